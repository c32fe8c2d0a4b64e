"""Paths and contents of znodes, compared with Java's."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgers.errors import CorruptionError, SettingsError
from ledgers.model import BookieId
from replication import znodes
from replication.ledger_record import WaitingNote
from replication.marks import (
    MarkedLedger,
    locked_ledger_ids,
    marked_ledger_ids,
    prepare_tree,
    read_marks,
)
from replication.nodes import LiveNode, Membership, Role, live_nodes
from replication.reasons import Blocked, Facts, Reason
from replication.znodes import Audit, Mark
from tests.memory.store import MemoryStore
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import LEDGER, PATHS, node_info
from tests.vectors import Case, cases

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def _znodes(*kinds: str) -> list[Case]:
    found = [case for case in cases("znode_payloads") if case["kind"] in kinds]
    assert found, kinds
    return found


def _name(case: Case) -> str:
    path: str = case["path"]
    return path.removeprefix(PATHS.directory)


# --- as Java --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("paths"), ids=lambda case: str(case["ledger_id"]))
def test_marks_and_locks_have_javas_paths(case: Case) -> None:
    ledger_id = case["ledger_id"]

    assert PATHS.mark(ledger_id) == case["under_replicated"]
    assert PATHS.lock(ledger_id) == case["lock"]


@pytest.mark.parametrize("case", cases("paths"), ids=lambda case: str(case["ledger_id"]))
def test_a_ledger_id_follows_from_its_mark_and_its_lock(case: Case) -> None:
    directory = case["under_replicated"].rpartition("/")[0]
    parent, _, name = directory.removeprefix(PATHS.marks + "/").rpartition("/")

    assert znodes.ledger_ids_below(parent, [name]) == [case["ledger_id"]]
    assert znodes.ledger_id_of_lock(case["lock"].rpartition("/")[2]) == case["ledger_id"]


@pytest.mark.parametrize("case", _znodes("mark"), ids=_name)
def test_marks_are_read_and_written_as_java_does(case: Case) -> None:
    fields, data = case["fields"], bytes.fromhex(case["data"])
    expected = Mark(replicas=tuple(fields["replicas"]), ctime_ms=fields["ctime"])

    assert znodes.parse_mark(data) == expected
    assert znodes.mark_to_bytes(expected) == data
    assert PATHS.mark(fields["ledger_id"]) == case["path"]


@pytest.mark.parametrize("case", _znodes("lock"), ids=_name)
def test_locks_are_read_and_written_as_java_does(case: Case) -> None:
    holder, data = case["fields"]["bookie_id"], bytes.fromhex(case["data"])

    assert znodes.parse_lock(data) == holder
    assert znodes.lock_to_bytes(holder) == data


@pytest.mark.parametrize("case", _znodes("vote", "elected auditor"), ids=_name)
def test_votes_are_read_and_written_as_java_does(case: Case) -> None:
    candidate, data = case["fields"]["bookie_id"], bytes.fromhex(case["data"])

    assert znodes.parse_vote(data) == candidate
    assert znodes.vote_to_bytes(candidate) == data
    assert case["path"].startswith(PATHS.election)


@pytest.mark.parametrize("case", _znodes("lost bookie recovery delay"), ids=lambda c: c["data"])
def test_the_recovery_delay_is_read_and_written_as_java_does(case: Case) -> None:
    delay_s, data = case["fields"]["delay_s"], bytes.fromhex(case["data"])

    assert znodes.parse_recovery_delay(data) == delay_s
    assert znodes.recovery_delay_to_bytes(delay_s) == data
    assert PATHS.recovery_delay == case["path"]


@pytest.mark.parametrize(
    ("kind", "audit"),
    [
        ("check-all time", Audit.ALL_LEDGERS),
        ("placement check time", Audit.PLACEMENT_POLICY),
        ("replicas check time", Audit.REPLICAS),
    ],
)
def test_times_of_audits_are_read_and_written_as_java_does(kind: str, audit: Audit) -> None:
    for case in _znodes(kind):
        time_ms, data = case["fields"]["ctime"], bytes.fromhex(case["data"])

        assert znodes.parse_audit_time(data) == (None if time_ms == -1 else time_ms)
        assert znodes.audit_time_to_bytes(time_ms) == data
        assert PATHS.audit_time(audit) == case["path"]


def test_the_layout_is_javas() -> None:
    (case,) = _znodes("under-replication layout")

    assert case["path"] == PATHS.layout
    assert case["data"] == znodes.LAYOUT_DATA.hex()
    znodes.check_layout(znodes.LAYOUT_DATA)


@pytest.mark.parametrize(
    ("kind", "path"),
    [("under-replication root", PATHS.directory), ("disable switch", PATHS.disable)],
)
def test_empty_znodes_have_javas_paths(kind: str, path: str) -> None:
    assert {case["path"] for case in _znodes(kind)} == {path}


# --- as tolerant as Java, and no more -------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "mark"),
    [
        pytest.param(b"", Mark(), id="no data"),
        pytest.param(
            b"replica:'a:1'ctime:5", Mark(replicas=(BookieId("a:1"),), ctime_ms=5), id="terse"
        ),
        pytest.param(
            b"# c\nctime: 5\nctime: 6", Mark(ctime_ms=6), id="a comment, the last value counts"
        ),
        pytest.param(
            b'replica: ["a:1", "b:1"]',
            Mark(replicas=(BookieId("a:1"), BookieId("b:1"))),
            id="a list",
        ),
    ],
)
def test_marks_are_read_as_the_text_format_allows(data: bytes, mark: Mark) -> None:
    assert znodes.parse_mark(data) == mark


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"replica", id="no value"),
        pytest.param(b'replica: "a', id="an open quote"),
        pytest.param(b'reason: "x"', id="a name that Java does not know"),
        pytest.param(b"ctime: 9223372036854775808", id="a number beyond 64 bits"),
        pytest.param(b"ctime: soon", id="no number"),
        pytest.param(b"\xff", id="no text"),
    ],
)
def test_a_mark_that_java_would_refuse_is_corruption(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        znodes.parse_mark(data)


@pytest.mark.parametrize("parse", [znodes.parse_lock, znodes.parse_vote])
def test_an_empty_lock_or_vote_names_no_node(parse: Callable[[bytes], str | None]) -> None:
    assert parse(b"") is None


def test_an_audit_that_never_ran_has_no_time() -> None:
    assert znodes.parse_audit_time(b"") is None


@pytest.mark.parametrize(
    ("data", "error"),
    [
        pytest.param(b'type: "BASIC"\nversion: 2\n', SettingsError, id="a later version"),
        pytest.param(b'type: "OTHER"\nversion: 1\n', SettingsError, id="another type"),
        pytest.param(b"version: 1\n", CorruptionError, id="no type"),
        pytest.param(b"", CorruptionError, id="empty"),
    ],
)
def test_a_tree_with_another_layout_is_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        znodes.check_layout(data)


@pytest.mark.parametrize(
    "data", [b"", b"-1", b"1.5", b" 1", b"1\n", b"2147483648", b"\xb2", b"1_0"]
)
def test_a_recovery_delay_that_is_no_number_is_corruption(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        znodes.parse_recovery_delay(data)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("urL1", id="too few digits"),
        pytest.param("urL00000000001", id="a zero too many"),
        pytest.param("urL9223372036854775808", id="beyond 64 bits"),
        pytest.param("urL000000000１", id="a digit of another script"),
        pytest.param("L0000000001", id="a ledger"),
        pytest.param("urL-000000001", id="negative"),
        pytest.param("", id="empty"),
    ],
)
def test_other_names_are_no_locks(name: str) -> None:
    assert znodes.ledger_id_of_lock(name) is None


def test_directories_that_are_no_ledgers_are_ignored() -> None:
    names = ["0002", "00FF", "2", "00002", "urL0", "00g0", ""]

    assert znodes.ledger_ids_below("0000/0000/0000", names) == [2]
    assert znodes.ledger_ids_below("ffff/0000/0000", names) == []


# --- any value, any bytes -------------------------------------------------------------------------


@given(
    st.builds(
        Mark,
        replicas=st.lists(TEXT.map(BookieId), max_size=4).map(tuple),
        ctime_ms=st.none() | st.integers(-(2**63), 2**63 - 1),
    )
)
def test_any_mark_survives_its_znode(mark: Mark) -> None:
    assert znodes.parse_mark(znodes.mark_to_bytes(mark)) == mark


@given(TEXT.filter(bool))
def test_any_lock_survives_its_znode(name: str) -> None:
    assert znodes.parse_lock(znodes.lock_to_bytes(name)) == name
    assert znodes.parse_vote(znodes.vote_to_bytes(name)) == name
    assert znodes.parse_pulsar_leader(znodes.pulsar_leader_to_bytes(name)) == name


@given(st.integers(0, 2**63 - 1))
def test_any_ledger_id_survives_its_path(ledger_id: int) -> None:
    path = PATHS.mark(ledger_id)
    parent, name, _ = path.removeprefix(PATHS.marks + "/").rsplit("/", 2)

    assert znodes.ledger_ids_below(parent, [name]) == [ledger_id]


@pytest.mark.parametrize(
    "parse",
    [
        znodes.parse_mark,
        znodes.parse_lock,
        znodes.parse_vote,
        znodes.parse_pulsar_leader,
        znodes.parse_recovery_delay,
        znodes.parse_audit_time,
        znodes.check_layout,
    ],
)
@given(data=st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_garbage_is_refused_in_the_documented_way(
    parse: Callable[[bytes], object], data: bytes
) -> None:
    with suppress(CorruptionError, SettingsError):
        parse(data)


@pytest.mark.parametrize("case", _znodes("mark"), ids=_name)
def test_every_truncation_of_a_mark_is_read_or_refused(case: Case) -> None:
    data = bytes.fromhex(case["data"])

    for length in range(len(data)):
        try:
            mark = znodes.parse_mark(data[:length])
        except CorruptionError:
            continue
        assert set(mark.replicas) <= set(case["fields"]["replicas"])


NOTE = WaitingNote(
    ledger_id=LEDGER,
    blocked=Blocked(reason=Reason.NO_COPY, facts=Facts(errors=("all gone",))),
    node="host-a",
    since_ms=5,
)


async def test_preparing_the_tree_is_idempotent_and_suits_java() -> None:
    cluster = Cluster()
    for _ in range(2):
        await prepare_tree(cluster.store, PATHS)

    assert (await cluster.store.get(PATHS.layout))[0] == znodes.LAYOUT_DATA
    for path in (PATHS.marks, PATHS.locks, PATHS.election):
        assert await cluster.store.children(path) == []


async def test_rule_s8_a_tree_with_another_layout_is_not_changed() -> None:
    cluster = Cluster()
    layout = b'type: "HIERARCHICAL"\nversion: 1\n'
    await cluster.store.create(PATHS.layout, layout, with_parents=True)

    with pytest.raises(SettingsError, match="BASIC"):
        await prepare_tree(cluster.store, PATHS)

    assert await cluster.store.children(PATHS.directory) == ["LAYOUT"]


# --- Members --------------------------------------------------------------------------------------


async def test_members_see_each_other_while_their_sessions_live(cluster: Cluster) -> None:
    one, two = MemoryStore(cluster.tree), MemoryStore(cluster.tree)
    first = await Membership.join(one, PATHS, node_info("host-a"))
    await Membership.join(two, PATHS, node_info("host-b", Role.AUDITOR))

    assert await first.live_nodes() == [
        LiveNode(info=node_info("host-a"), session_id=one.session_id),
        LiveNode(info=node_info("host-b", Role.AUDITOR), session_id=two.session_id),
    ]

    await two.close()
    assert [node.info.host for node in await first.live_nodes()] == ["host-a"]


async def test_members_of_a_later_release_are_ignored(cluster: Cluster) -> None:
    for name, data in [("a", b"not json"), ("b", b"[]"), ("c", b'{"role": "third"}')]:
        await cluster.store.create(f"{PATHS.nodes}/{name}", data)

    assert await live_nodes(cluster.store, PATHS) == []


async def test_a_members_data_is_read_once(cluster: Cluster) -> None:
    membership = await Membership.join(cluster.store, PATHS, node_info("host-a"))
    await membership.live_nodes()
    before = cluster.store.request_count

    await membership.live_nodes()

    assert cluster.store.request_count == before + 1


async def test_new_members_are_read_in_parallel(cluster: Cluster) -> None:
    for number in range(50):
        await Membership.join(cluster.store, PATHS, node_info(f"host-{number}"))

    async def travel() -> None:
        await asyncio.sleep(1)

    cluster.tree.latency = travel
    began_s = cluster.clock.now_s()
    assert len(await live_nodes(cluster.store, PATHS)) == 50
    assert cluster.clock.now_s() - began_s == 4, "one request for their names, one for all the rest"


# --- Notes ----------------------------------------------------------------------------------------


async def test_the_last_note_is_read_as_it_was_written(cluster: Cluster) -> None:
    async with cluster.node() as node:
        await node.notes.put(replace(NOTE, since_ms=4))
        await node.notes.put(NOTE)

        assert await node.notes.read(LEDGER) == NOTE
        assert await node.notes.ledger_ids() == {LEDGER}


async def test_a_note_that_was_written_since_is_not_deleted(cluster: Cluster) -> None:
    """It belongs to a new mark."""
    async with cluster.node() as node:
        written = await node.notes.put(NOTE)
        await node.notes.put(replace(written, node="host-b"))
        assert written.version is not None

        await node.queue.delete_note(LEDGER, version=written.version)
        assert await node.notes.ledger_ids() == {LEDGER}


async def test_a_note_is_written_although_its_directory_was_deleted(cluster: Cluster) -> None:
    await cluster.store.delete(PATHS.waiting)
    async with cluster.node() as node:
        await node.notes.put(NOTE)

        assert await node.notes.read(LEDGER) == NOTE


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"[1]", id="no object"),
        pytest.param(b"\xff", id="no text"),
        pytest.param(NOTE.to_json().replace(b"no-copy", b"a-new-one"), id="an unknown reason"),
        pytest.param(NOTE.to_json().replace(b'"node"', b'"host"'), id="a name is missing"),
    ],
)
async def test_a_note_of_a_later_release_is_ignored(cluster: Cluster, data: bytes) -> None:
    await cluster.store.create(PATHS.waiting_note(LEDGER), data)
    async with cluster.node() as node:
        assert await node.notes.read(LEDGER) is None
        assert await node.notes.ledger_ids() == {LEDGER}


# --- Lists ----------------------------------------------------------------------------------------


async def test_the_whole_queue_is_listed_in_order(cluster: Cluster) -> None:
    ledger_ids = [3, 65_536, 2**33, 2**62]
    for ledger_id in reversed(ledger_ids):
        await cluster.mark(B1, ledger_id=ledger_id)
    await cluster.store.create(PATHS.lock(3))
    await cluster.store.create(f"{PATHS.locks}/strange")

    assert await marked_ledger_ids(cluster.store, PATHS) == ledger_ids
    assert await locked_ledger_ids(cluster.store, PATHS) == {3}


async def test_unreadable_marks_are_listed_and_deleted_ones_are_not(cluster: Cluster) -> None:
    await cluster.mark(B1, B2, ledger_id=1, ctime_ms=9)
    await cluster.store.create(PATHS.mark(2), b"\xff", with_parents=True)

    assert await read_marks(cluster.store, PATHS, [1, 2, 3]) == [
        MarkedLedger(ledger_id=1, mark=Mark(replicas=(B1, B2), ctime_ms=9)),
        MarkedLedger(ledger_id=2, mark=None),
    ]


async def test_without_its_znodes_the_queue_is_empty() -> None:
    cluster = Cluster()

    assert await marked_ledger_ids(cluster.store, PATHS) == []
    assert await locked_ledger_ids(cluster.store, PATHS) == set()
    assert await live_nodes(cluster.store, PATHS) == []
