"""Notes of deferred ledgers, and when an improved cluster overrides them: values only."""

import asyncio
import json
import random
from dataclasses import replace

import pytest
from msgspec import structs

from ledgers.errors import CorruptionError
from ledgers.model import BookieId, LedgerState
from ledgers.registration import BookieView
from ledgers.store import Stat
from replication import backoff, ledger_record
from replication.backoff import JITTER, REMEMBERED_S, Deferral, retry_wait_s
from replication.cluster import ClusterView
from replication.ledger_record import (
    BINDING_MAX_MS,
    ClusterFingerprint,
    UnprovenEnd,
    WaitingNote,
    read_unproven,
    read_unproven_end,
)
from replication.orders import DrainOrder, LimitsOrder, MaintenanceWindow, Orders
from replication.reasons import (
    SAME_REASON_MAX,
    Blocked,
    Exclusion,
    Facts,
    Reason,
    absence_facts,
    gravest,
)
from replication.settings import ReplicationSettings
from replication.worker import TIDY_INTERVAL_S
from tests.replication.cluster import Cluster, queue_empty, shut_out, until
from tests.replication.ledger_values import B1, B2, B3, registered
from tests.replication.nodes import LEDGER, PATHS, Node, working
from tests.replication.repairs import THREE
from tests.replication.workers import noted

FINGERPRINT = ClusterFingerprint(newest_czxid=7, bookies="b", orders="o")
BETTER = replace(FINGERPRINT, newest_czxid=8)
NOTE = WaitingNote(
    ledger_id=5,
    blocked=Blocked(reason=Reason.NO_TARGET, facts=Facts(errors=("no bookie has space",))),
    node="host-a",
    since_ms=1,
    tries=3,
    next_try_ms=1_000,
    fingerprint=FINGERPRINT,
    suspects=frozenset({B1, B2}),
)

# --- Notes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("note", "now_ms", "fingerprint", "wait_ms"),
    [
        pytest.param(NOTE, 400, FINGERPRINT, 600, id="until its time"),
        pytest.param(NOTE, 1_000, FINGERPRINT, 0, id="its time has come"),
        pytest.param(NOTE, 400, BETTER, 0, id="an improved cluster"),
        pytest.param(
            replace(NOTE, blocked=Blocked(reason=Reason.LEFT_TO_OTHERS)),
            400,
            FINGERPRINT,
            0,
            id="it bound its writer only",
        ),
        pytest.param(
            replace(NOTE, fingerprint=None), 400, FINGERPRINT, 0, id="without a fingerprint"
        ),
        pytest.param(
            replace(NOTE, next_try_ms=10**15), 0, FINGERPRINT, BINDING_MAX_MS, id="from a mad clock"
        ),
    ],
)
def test_how_long_a_note_counts(
    note: WaitingNote, now_ms: int, fingerprint: ClusterFingerprint, wait_ms: int
) -> None:
    assert note.wait_ms(now_ms=now_ms, fingerprint=fingerprint) == wait_ms


GRACE = replace(NOTE, blocked=Blocked(reason=Reason.OPEN_LEDGER_GRACE), grace_until_ms=900)


@pytest.mark.parametrize(
    ("note", "fingerprint", "is_overtaken"),
    [
        pytest.param(NOTE, FINGERPRINT, False, id="all is as it was"),
        pytest.param(NOTE, BETTER, True, id="a bookie came"),
        pytest.param(replace(NOTE, fingerprint=None), BETTER, False, id="without a fingerprint"),
        pytest.param(
            replace(NOTE, blocked=Blocked(reason=Reason.JOURNAL)),
            BETTER,
            False,
            id="no bookie helps",
        ),
        pytest.param(GRACE, BETTER, False, id="its grace continues all the same"),
        pytest.param(
            replace(GRACE, blocked=Blocked(reason=Reason.NO_COVERAGE)),
            BETTER,
            True,
            id="it may end",
        ),
        pytest.param(replace(GRACE, grace_until_ms=400), BETTER, True, id="its grace is over"),
    ],
)
def test_a_notes_reason_may_no_longer_be_true(
    note: WaitingNote, fingerprint: ClusterFingerprint, is_overtaken: bool
) -> None:
    assert note.is_overtaken(now_ms=400, fingerprint=fingerprint) is is_overtaken


def deferred(reason: Reason | None = Reason.NO_TARGET) -> Deferral:
    return Deferral(due_s=100.0, fingerprint=FINGERPRINT, reason=reason, tries=3)


@pytest.mark.parametrize("of", [NOTE, deferred()], ids=["in a note", "by a worker"])
@pytest.mark.parametrize(
    ("reason", "fingerprint", "tries"),
    [
        pytest.param(Reason.NO_TARGET, FINGERPRINT, 3, id="alike"),
        pytest.param(Reason.NO_COPY, FINGERPRINT, 0, id="another reason"),
        pytest.param(Reason.NO_TARGET, BETTER, 0, id="an improved cluster"),
    ],
)
def test_tries_that_fail_for_the_same_reason_are_counted(
    of: WaitingNote | Deferral, reason: Reason, fingerprint: ClusterFingerprint, tries: int
) -> None:
    assert of.tries_for(reason, fingerprint=fingerprint) == tries


def test_tries_of_a_note_without_a_fingerprint_do_not_count() -> None:
    note = replace(NOTE, fingerprint=None)

    assert note.tries_for(Reason.NO_TARGET, fingerprint=FINGERPRINT) == 0


def test_a_note_stores_reason_and_facts_of_all_obstacles() -> None:
    blocked = Blocked(
        reason=Reason.NO_TARGET,
        facts=Facts(replaced=B1, excluded=((Exclusion.MEMBER, 2),), draining=(B2,)),
        until_ms=7,
        besides=(Blocked(reason=Reason.MAINTENANCE, facts=Facts(in_maintenance=(B3,))),),
    )

    data = replace(NOTE, blocked=blocked).to_json()

    assert json.loads(data)["blocked"] == {
        "reason": "no-target",
        "facts": {"replaced": B1, "excluded": [["member", 2]], "draining": [B2]},
        "until_ms": 7,
        "besides": [{"reason": "maintenance", "facts": {"in_maintenance": [B3]}}],
    }
    assert WaitingNote.parse(data).blocked == blocked


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"reason": "a-later-reason"}, id="a reason of a later release"),
        pytest.param({"facts": {"entry_count": "five"}}, id="a fact of another type"),
        pytest.param({"facts": {"comment": "\ud800"}}, id="text that cannot be written"),
        pytest.param({"besides": "none"}, id="no array"),
    ],
)
def test_a_note_that_this_release_cannot_read_is_corrupt(change: dict[str, object]) -> None:
    record = json.loads(NOTE.to_json())
    record["blocked"].update(change)

    with pytest.raises(CorruptionError):
        WaitingNote.parse(json.dumps(record).encode())


def test_unknown_fields_are_ignored() -> None:
    record = {**json.loads(NOTE.to_json()), "colour": "red"}

    assert WaitingNote.parse(json.dumps(record).encode()) == NOTE


def view(*, draining: bool = False, **czxids: int) -> ClusterView:
    writable = registered({BookieId(f"{name}:3181"): czxid for name, czxid in czxids.items()})
    orders = Orders(draining={B1: DrainOrder(since_ms=1)} if draining else {})
    return ClusterView(bookies=BookieView(writable=writable), orders=orders)


@pytest.mark.compat("G13", verdict="better")
@pytest.mark.parametrize(
    ("then", "now", "reason", "has_improved"),
    [
        pytest.param(view(a=1, b=2), view(a=1, b=2), Reason.NO_COPY, False, id="the same"),
        pytest.param(view(a=1), view(a=1, b=2), Reason.NO_COPY, True, id="a bookie came"),
        pytest.param(view(a=1, b=2), view(a=3, b=2), Reason.NO_COPY, True, id="a bookie returned"),
        pytest.param(view(a=1, b=2), view(b=2), Reason.NO_TARGET, False, id="a bookie disappeared"),
        pytest.param(
            view(a=1, b=2), view(a=1), Reason.NO_TARGET, False, id="the newest bookie disappeared"
        ),
        pytest.param(
            view(a=1, b=2), view(b=2), Reason.NO_COPY, True, id="an older bookie disappeared"
        ),
        pytest.param(
            view(a=1, b=2), view(b=2), Reason.MAINTENANCE, True, id="and another is absent"
        ),
        pytest.param(
            view(a=1, b=2),
            view(a=1),
            Reason.NO_ANSWER,
            True,
            id="the unresponsive bookie disappeared",
        ),
        pytest.param(
            view(a=1, b=2), view(a=1, c=3), Reason.NO_COPY, True, id="one bookie for another"
        ),
        pytest.param(view(a=1, draining=True), view(a=1), Reason.NO_TARGET, True, id="order over"),
        pytest.param(view(), view(), Reason.NO_COPY, False, id="no bookie is registered"),
    ],
)
def test_a_new_bookie_or_a_changed_order_improves_the_cluster(
    then: ClusterView, now: ClusterView, reason: Reason, has_improved: bool
) -> None:
    assert (
        ClusterFingerprint.of(now).warrants_retry(ClusterFingerprint.of(then), reason)
        is has_improved
    )


@pytest.mark.parametrize(
    ("orders", "is_another"),
    [
        pytest.param(Orders(), False, id="none"),
        pytest.param(Orders(limits=LimitsOrder(bytes_per_s=1)), False, id="limits block nothing"),
        pytest.param(
            Orders(maintenance={B2: MaintenanceWindow(since_ms=1, until_ms=9)}), True, id="a window"
        ),
        pytest.param(Orders(draining={B2: DrainOrder(since_ms=1)}), True, id="a drain"),
    ],
)
def test_orders_that_may_block_belong_to_the_fingerprint(orders: Orders, is_another: bool) -> None:
    assert (
        ClusterFingerprint.of(replace(view(a=1), orders=orders)) != ClusterFingerprint.of(view(a=1))
    ) is is_another


@pytest.mark.parametrize(
    ("bookies", "facts"),
    [
        pytest.param([], Facts(), id="no bookie"),
        pytest.param([B1], Facts(), id="registered"),
        pytest.param([B2, B1], Facts(absent=(B2,)), id="absent"),
        pytest.param([B3], Facts(decommissioned=(B3,)), id="without a cookie"),
        pytest.param([B3, B2], Facts(absent=(B2,), decommissioned=(B3,)), id="one of each"),
    ],
)
def test_absent_and_decommissioned_bookies_are_distinguished(
    bookies: list[BookieId], facts: Facts
) -> None:
    seen = ClusterView(
        bookies=BookieView(writable=registered((B1,))),
        cookies=dict.fromkeys((B1, B2), Stat(version=0)),
    )

    assert absence_facts(bookies, seen) == facts


# --- Reports of ledgers whose end cannot be proven, marked or not ---------------------------------


async def unproven(cluster: Cluster) -> list[int]:
    ends = await read_unproven(cluster.store, cluster.manager, PATHS)
    return [end.ledger_id for end in ends]


async def recorded(cluster: Cluster) -> list[str]:
    return sorted(await cluster.store.children(PATHS.waiting))


async def whole_but_unproven() -> Cluster:
    """Return a ledger whose B1 and B2 returned reformatted: they may have had more entries than
    B3."""
    cluster = await Cluster.start()
    await cluster.write_ledger(
        THREE, last=-1, write_quorum=3, ack_quorum=2, state=LedgerState.IN_RECOVERY
    )
    for entry_id in range(4):
        cluster.put(LEDGER, entry_id, *THREE, lac=-1)
    await cluster.reformat(B1, B2)
    await cluster.mark()
    return cluster


async def write_ledgers(cluster: Cluster, *ledger_ids: int) -> None:
    for ledger_id in ledger_ids:
        await cluster.write_ledger(THREE, ledger_id=ledger_id, state=LedgerState.IN_RECOVERY)


async def close(cluster: Cluster, ledger_id: int = LEDGER) -> None:
    found = await cluster.manager.read(ledger_id)
    closed = found.metadata.closed(last_entry_id=3, length=40)
    await cluster.manager.write(ledger_id, closed, read_as=found)


async def test_it_is_recorded_when_the_ledger_is_whole_and_unmarked() -> None:
    cluster = await whole_but_unproven()

    async with cluster.node() as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))
        await asyncio.sleep(2 * TIDY_INTERVAL_S)

    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY
    assert await unproven(cluster) == [LEDGER]
    end = (await read_unproven_end(cluster.store, PATHS, LEDGER)).value
    assert end is not None
    assert "0 to 3 remain" in end.facts.errors[0]
    assert end.facts.reformatted == (B1, B2)
    assert not end.facts.unresponsive, "all its bookies are there"
    assert await read_unproven(cluster.store, cluster.manager, PATHS, {LEDGER, 99}) == [end]
    assert await read_unproven(cluster.store, cluster.manager, PATHS, {99}) == []


async def test_a_closed_ledger_is_no_longer_reported() -> None:
    cluster = await whole_but_unproven()

    async with cluster.node() as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))
        await close(cluster)
        assert await unproven(cluster) == []
        assert await read_unproven(cluster.store, cluster.manager, PATHS, {LEDGER}) == []
        assert await recorded(cluster) == [str(LEDGER)]
        await asyncio.sleep(2 * TIDY_INTERVAL_S)

    assert await recorded(cluster) == []


async def test_unreadable_ledgers_are_reported_but_deleted_ones_not(cluster: Cluster) -> None:
    await write_ledgers(cluster, 1, 2, 3)
    async with cluster.node() as node:
        for ledger_id in (1, 2, 3, 4):
            await node.note_unproven(ledger_id, Facts(errors=("why",)))
        await close(cluster, 1)
        await cluster.store.set(cluster.manager.path(2), b"nonsense", version=-1)
        shut_out(node.store, cluster.manager.path(3))

        await node.worker.waiting.tidy()

    assert await recorded(cluster) == ["2", "3"]
    assert await unproven(cluster) == [2, 3]


async def test_the_last_try_is_reported(cluster: Cluster) -> None:
    async with cluster.node() as node:
        await node.note_unproven(LEDGER, Facts(errors=("one is silent",)))
        await asyncio.sleep(60)
        await node.note_unproven(LEDGER, Facts(errors=("all denied it",)))

    stored = await read_unproven_end(cluster.store, PATHS, LEDGER)
    assert stored.value == UnprovenEnd(
        ledger_id=LEDGER, facts=Facts(errors=("all denied it",)), tried_ms=cluster.clock.wall_ms()
    )


async def test_of_very_many_some_are_checked_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_record, "READ_MAX", 2)
    monkeypatch.setattr(backoff, "NOTES_TIDIED_MAX", 2)
    cluster = await Cluster.start()
    async with cluster.node() as node:
        for ledger_id in range(4):  # of which there is none
            await node.note_unproven(ledger_id, Facts(errors=("why",)))
        assert await unproven(cluster) == [2, 3]

        await node.worker.waiting.tidy()
        assert len(await recorded(cluster)) == 2
        await node.worker.waiting.tidy()

    assert await unproven(cluster) == []


@pytest.mark.parametrize("data", [b"", b"[1]", b'{"facts": 5}'])
async def test_an_unreadable_record_counts_as_none(cluster: Cluster, data: bytes) -> None:
    await cluster.store.create(PATHS.waiting_note(LEDGER), data, with_parents=True)

    stored = await read_unproven_end(cluster.store, PATHS, LEDGER)
    assert stored.value is None
    assert stored.is_unreadable


async def test_no_other_note_and_no_release_loses_why_the_end_is_not_proven() -> None:
    cluster, facts = await Cluster.start(), Facts(errors=("why",))
    other = WaitingNote(
        ledger_id=LEDGER, blocked=Blocked(reason=Reason.NO_TARGET), node="host", since_ms=1
    )

    async def left(node: Node) -> tuple[Reason, Facts | None]:
        note = await noted(node)
        return note.reason, note.unproven.facts if note.unproven else None

    async with cluster.node() as node:
        await node.note_unproven(LEDGER, facts)
        written = await node.notes.put(other)  # by a worker that knows of no note
        assert await left(node) == (Reason.NO_TARGET, facts)

        await node.notes.put(replace(written, tries=2))
        assert await left(node) == (Reason.NO_TARGET, facts)

        await node.notes.let_go(LEDGER, guards=())
        assert await left(node) == (Reason.LEFT_TO_OTHERS, facts)
        assert (await noted(node)).is_released

        await node.notes.put(written)  # whose version is an old one
        await cluster.mark()
        lease = await node.lease()
        await node.queue.read_note(lease)
        assert await node.queue.complete(lease)
        assert await left(node) == (Reason.LEFT_TO_OTHERS, facts)

        await node.notes.let_go(LEDGER, guards=(), is_end_known=True)
        assert await node.notes.read(LEDGER) is None


async def test_a_known_note_is_written_again_and_deleted_without_reading_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = WaitingNote(
        ledger_id=LEDGER, blocked=Blocked(reason=Reason.NO_TARGET), node="host", since_ms=1
    )
    async with cluster.node() as node:
        get = node.store.get

        async def get_other(path: str) -> tuple[bytes, Stat]:
            assert path != PATHS.waiting_note(LEDGER)
            return await get(path)

        monkeypatch.setattr(node.store, "get", get_other)
        await cluster.mark()
        lease = await node.lease()
        for _ in range(3):
            await node.queue.write_note(lease, note)
        assert await node.queue.complete(lease)

    assert await recorded(cluster) == []


# --- A ledger that could not be repaired is tried again after a backoff ---------------------------

SEED = 20
SETTINGS = ReplicationSettings(retry_min_s=10, retry_max_s=300)


@pytest.mark.compat(
    "TestReplicationWorker.testDeferLedgerLockReleaseForReplicationWorker", verdict="other"
)
@pytest.mark.parametrize(
    ("reason", "nominal_s"),
    [
        pytest.param(Reason.NO_TARGET, [10, 20, 40, 80, 160, 300, 300], id="as set"),
        pytest.param(None, [10, 20, 40, 80, 160, 300, 300], id="unknown: as set"),
        pytest.param(Reason.NO_COPY, [60, 120, 240, 480, 960, 1920, 3600], id="long"),
        pytest.param(Reason.CORRUPT_METADATA, [60, 120, 240, 480, 960, 1920, 3600], id="long, too"),
        pytest.param(
            Reason.ACCESS_DENIED, [60, 120, 240, 480, 960, 1920, 3600], id="and for the first try"
        ),
        pytest.param(Reason.NO_ANSWER, [2, 4, 8, 16, 32, 60, 60], id="short"),
    ],
)
def test_the_wait_doubles_up_to_its_bound_with_jitter(
    reason: Reason | None, nominal_s: list[float]
) -> None:
    rng = random.Random(SEED)

    for tries, expected_s in enumerate(nominal_s, start=1):
        waits_s = [retry_wait_s(SETTINGS, reason, tries=tries, rng=rng) for _ in range(20)]
        assert all((1 - JITTER) * expected_s <= s <= (1 + JITTER) * expected_s for s in waits_s)
        assert len(set(waits_s)) > 1


def test_the_wait_is_bounded_for_any_number_of_tries() -> None:
    wait_s = retry_wait_s(SETTINGS, None, tries=10**6, rng=random.Random(SEED))

    assert wait_s <= 300 * (1 + JITTER)


@pytest.mark.compat("G13", verdict="better")
@pytest.mark.parametrize(
    ("now_s", "fingerprint", "reason", "is_due"),
    [
        pytest.param(99.9, FINGERPRINT, Reason.NO_TARGET, False, id="too early"),
        pytest.param(100.0, FINGERPRINT, Reason.NO_TARGET, True, id="its time has come"),
        pytest.param(0.0, BETTER, Reason.NO_TARGET, True, id="a bookie came"),
        pytest.param(
            0.0, replace(FINGERPRINT, orders="p"), Reason.NO_TARGET, True, id="an order changed"
        ),
        pytest.param(
            0.0,
            replace(FINGERPRINT, bookies="c"),
            Reason.NO_TARGET,
            False,
            id="a bookie disappeared: no help",
        ),
        pytest.param(
            0.0,
            replace(FINGERPRINT, bookies="c"),
            Reason.NO_ANSWER,
            True,
            id="the unresponsive bookie, perhaps",
        ),
        pytest.param(
            0.0,
            replace(FINGERPRINT, newest_czxid=3, bookies="c"),
            Reason.NO_TARGET,
            False,
            id="the newest bookie disappeared",
        ),
    ],
)
def test_a_ledger_is_due_in_time_or_when_the_cluster_improves(
    now_s: float, fingerprint: ClusterFingerprint, reason: Reason, is_due: bool
) -> None:
    assert deferred(reason).is_due(now_s=now_s, fingerprint=fingerprint) is is_due


@pytest.mark.compat(
    "G13",
    verdict="better",
    why="all nodes follow one note per ledger; success, a new bookie or a changed order resets "
    "the backoff",
)
async def test_success_resets_the_count(cluster: Cluster) -> None:
    async with cluster.node() as node:
        waiting = node.worker.waiting
        waiting.pause(LEDGER, 100.0)
        assert waiting.due([LEDGER], losses={LEDGER}) == []

        waiting.complete(LEDGER)

        assert waiting.due([LEDGER], losses={LEDGER}) == [LEDGER]
        assert LEDGER not in waiting._deferrals


@pytest.mark.parametrize(("after_s", "is_kept"), [(REMEMBERED_S - 1, True), (REMEMBERED_S, False)])
async def test_ledgers_due_long_ago_are_forgotten(after_s: float, is_kept: bool) -> None:
    cluster = await Cluster.start()
    async with cluster.node() as node:
        waiting = node.worker.waiting
        waiting.pause(LEDGER, 100.0)
        await asyncio.sleep(100.0 + after_s)

        waiting.due([], losses=())

        assert (LEDGER in waiting._deferrals) is is_kept


AWAY = Blocked(reason=Reason.MAINTENANCE, facts=Facts(in_maintenance=(B1,)), until_ms=5)
NOBODY = Blocked(reason=Reason.NO_TARGET, facts=Facts(replaced=B2), until_ms=9)
LOST = Blocked(reason=Reason.NO_COPY, facts=Facts(entry_ids=(4,), entry_count=1))


@pytest.mark.parametrize(
    ("blocked", "combined"),
    [
        pytest.param(
            [AWAY, NOBODY],
            structs.replace(NOBODY, until_ms=5, besides=(AWAY,)),
            id="reasons that need help, before those that time removes",
        ),
        pytest.param(
            [AWAY, NOBODY, LOST, NOBODY],
            structs.replace(LOST, besides=(NOBODY, AWAY)),
            id="that entries have no copy, before all else",
        ),
        pytest.param([LOST, LOST], LOST, id="equal ones once"),
    ],
)
def test_the_most_serious_reason_comes_first(blocked: list[Blocked], combined: Blocked) -> None:
    assert gravest(blocked) == combined


def test_some_of_many_blocked_for_one_reason_are_kept() -> None:
    """Other reasons are kept as well."""
    many = [
        Blocked(reason=Reason.MISPLACED, facts=Facts(entry_ids=(entry_id,)))
        for entry_id in range(100)
    ]

    reasons = gravest([AWAY, *many]).all_reasons

    assert reasons == (*[Reason.MISPLACED] * SAME_REASON_MAX, Reason.MAINTENANCE)
