"""Copying one bookie index of one fragment, on bookies in memory."""

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import cast

import pytest
from msgspec.structs import replace

from ledgers.bookies import LAST_ENTRY, Answer, Bookies, SourceHealth, Transfer, TransferResult
from ledgers.digest import EntryDigest, EntryHeader
from ledgers.errors import BusyError, FencedError, NoAnswerError, ReadOnlyError, UnavailableError
from ledgers.model import BookieId, DigestType, LedgerMetadata, LedgerState, Segment
from replication.copying import (
    LACKING_MAX,
    RESUME_PAUSE_S,
    SOURCE_RUN_ENTRIES,
    CopyJob,
    CopyOutcome,
    Tried,
    assign,
    copy_index,
    lac_for_copies,
    replace_lac,
    transfer_replacing_lac,
)
from replication.entry_runs import EntryRuns
from tests.memory.bookies import NO_FAULT, Fault, Op
from tests.replication.cluster import DIGEST, ENTRY_BYTES, Cluster, entry_bytes, named_by
from tests.replication.copies import ALL, cluster_with_ledger, copy, job, whole_ledger
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, BOOKIES, fragment
from tests.replication.nodes import LEDGER, working
from tests.virtual_time import run


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testReplicateLFShouldCopyFailedBookieFragmentsToTargetBookie",
    verdict="better",
)
async def test_rule_s12_exactly_the_entries_of_the_index_are_copied() -> None:
    """Byte for byte."""
    cluster = await cluster_with_ledger()

    outcome = await copy(cluster, job())

    # E 3, W 2: index 2 stores 1 2 4 5 7 8
    assert cluster.bookie(B4).entry_ids(LEDGER) == {1, 2, 4, 5, 7, 8}
    assert all(
        cluster.bookie(B4).read(LEDGER, e) == entry_bytes(LEDGER, e) for e in (1, 2, 4, 5, 7, 8)
    )
    assert outcome == CopyOutcome(entry_count=6, entry_bytes=6 * ENTRY_BYTES)
    assert outcome.is_complete


async def test_good_entries_are_read_once() -> None:
    cluster = await cluster_with_ledger(write_quorum=3)

    await copy(cluster, job(write_quorum=3))

    assert sorted([*cluster.bookies.asked(B1), *cluster.bookies.asked(B2)]) == list(range(10))


@pytest.mark.parametrize("answer", [Answer.ABSENT, Answer.MISMATCH, Answer.UNKNOWN])
async def test_an_entry_missing_at_one_replica_is_read_from_the_next(answer: Answer) -> None:
    cluster = await cluster_with_ledger(write_quorum=3)
    match answer:
        case Answer.ABSENT:
            cluster.bookie(B1).wipe()
        case Answer.MISMATCH:
            for entry_id in range(10):
                cluster.bookie(B1).corrupt(LEDGER, entry_id)
        case Answer.UNKNOWN:
            cluster.bookies.fail(B1, Op.READ, Fault(error=UnavailableError))

    outcome = await copy(cluster, job(write_quorum=3))

    assert outcome.is_complete
    assert all(cluster.has_good_copy(B4, LEDGER, entry_id) for entry_id in range(10))


@pytest.mark.compat("G12", verdict="better")
async def test_rule_s7_nothing_of_a_damaged_copy_is_written() -> None:
    cluster = await cluster_with_ledger()
    for bookie in (B1, B2):
        if 4 in cluster.bookie(bookie).entry_ids(LEDGER):
            cluster.bookie(bookie).corrupt(LEDGER, 4)

    outcome = await copy(cluster, job())

    assert outcome.without_copy == (4,)
    assert outcome.unknown == ()
    assert not outcome.is_complete
    assert cluster.bookie(B4).entry_ids(LEDGER) == {1, 2, 5, 7, 8}


async def test_rule_s5_an_unanswered_entry_is_not_called_lost() -> None:
    cluster = await cluster_with_ledger(write_quorum=3)
    cluster.bookie(B1).lose(LEDGER, 4)
    cluster.bookies.fail(B2, Op.READ, Fault(error=UnavailableError))

    outcome = await copy(cluster, job(write_quorum=3))

    assert outcome.unknown == (4,)
    assert outcome.without_copy == ()
    assert outcome.entry_count == 9


async def test_rule_s15_former_members_are_asked_before_it_is_lost() -> None:
    cluster = await cluster_with_ledger()
    cluster.bookie(B1).wipe()
    cluster.bookie(B2).wipe()
    for entry_id in (1, 2, 4):
        cluster.put(LEDGER, entry_id, B5)
    cluster.put(LEDGER, 5, B6)

    outcome = await copy(cluster, job(former=(B5, B6)))

    assert outcome.without_copy == (7, 8)
    assert cluster.bookie(B4).entry_ids(LEDGER) == {1, 2, 4, 5}


async def test_rule_s15_a_damaged_bookie_gives_entries_no_other_has() -> None:
    """The bookie will be replaced."""
    cluster = await cluster_with_ledger()
    cluster.bookie(B2).corrupt(LEDGER, 4)
    cluster.bookie(B3).lose(LEDGER, 1)

    outcome = await copy(cluster, job(index=1, available=ALL))

    # E 3, W 2: index 1 stores 0 1 3 4 6 7 9; 4 is on B2 and B3, 1 too
    assert outcome.is_complete
    assert cluster.bookies.asked(B2) == [1]


async def test_former_members_are_not_asked_while_replicas_answer() -> None:
    cluster = await cluster_with_ledger()

    await copy(cluster, job(former=(B5, B6)))

    assert cluster.bookies.asked(B5) == cluster.bookies.asked(B6) == []


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testReplicateLFShouldReturnFalseIfTheReplicationFails",
    verdict="better",
    why="another target is tried first",
)
@pytest.mark.parametrize("error", [FencedError, ReadOnlyError, UnavailableError])
async def test_rule_s11_a_failing_target_ends_the_copy(error: type[Exception]) -> None:
    cluster = await cluster_with_ledger()
    cluster.bookies.fail(B4, Op.ADD, Fault(error=error))  # type: ignore[arg-type]

    outcome = await copy(cluster, job())

    assert isinstance(outcome.target_error, error)
    assert not outcome.is_complete
    assert outcome.entry_count == 0
    assert len(cluster.bookies.transfers) == 1


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testSplitIntoSubFragmentsWithDifferentFragmentBoundaries",
    verdict="other",
    why="parts are as long as a transfer allows, have a window in bytes, and follow without a "
    "pause",
)
async def test_a_long_copy_is_made_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await cluster_with_ledger()
    monkeypatch.setattr("replication.copying.SLICE_ENTRIES", 2)
    for entry_id in (1, 7):  # in the first and in the last slice; only B2 has them too
        cluster.bookie(B2).lose(LEDGER, entry_id)

    outcome = await copy(cluster, job())

    assert [sum(map(len, t.reads.values())) for t, _ in cluster.bookies.transfers] == [2, 2, 2]
    assert outcome.without_copy == (1, 7)
    assert outcome.entry_count == 4


@pytest.mark.parametrize("entries_before", [0, 4], ids=["at once", "after much was acknowledged"])
async def test_after_a_late_break_a_target_is_sent_only_the_rest(
    monkeypatch: pytest.MonkeyPatch, entries_before: int
) -> None:
    cluster = await cluster_with_ledger()
    monkeypatch.setattr("replication.copying.RESUME_WORTH_ENTRIES", 4)
    adds = 0

    def break_once(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
        nonlocal adds
        adds += op is Op.ADD
        is_now = op is Op.ADD and adds == entries_before + 1
        return Fault(error=UnavailableError) if is_now else NO_FAULT

    cluster.bookies.faults = break_once

    outcome = await copy(cluster, job())

    if entries_before:
        assert outcome.is_complete
        assert adds == 6 + 1, "what was acknowledged is not sent again"
    else:
        assert isinstance(outcome.target_error, UnavailableError)


async def test_a_busy_target_is_waited_for_within_bounds() -> None:
    cluster = await cluster_with_ledger()
    cluster.bookies.fail(B4, Op.ADD, Fault(error=BusyError))
    waiting = asyncio.create_task(copy(cluster, job()))
    await asyncio.sleep(RESUME_PAUSE_S / 2)
    cluster.bookies.stop_failing(B4, Op.ADD)
    assert (await waiting).is_complete

    cluster.bookies.fail(B4, Op.ADD, Fault(error=BusyError))
    outcome = await copy(cluster, job())

    assert isinstance(outcome.target_error, BusyError)


class _Giving:
    """Bookies that return and store any entry, and count the bytes that they receive."""

    def __init__(self, *, fails: bool = False) -> None:
        self.entry_count = 0
        self.memory_bytes = 0
        self._fails = fails

    def source_health(self, bookie: BookieId) -> SourceHealth:
        return SourceHealth()

    async def transfer(self, transfer: Transfer) -> TransferResult:
        count = sum(map(len, transfer.reads.values()))
        self.entry_count += count
        await asyncio.sleep(0)
        self.memory_bytes = max(self.memory_bytes, tracemalloc.get_traced_memory()[0])
        if self._fails:
            return TransferResult(
                failures={
                    b: dict.fromkeys(ids, Answer.UNKNOWN) for b, ids in transfer.reads.items()
                }
            )
        return TransferResult(entry_count=count)


@pytest.mark.parametrize("is_in_place", [False, True], ids=["to a new member", "in place"])
@pytest.mark.parametrize("write_quorum", [3, 2])
def test_the_memory_of_a_copy_does_not_grow_with_its_ledger(
    write_quorum: int, is_in_place: bool
) -> None:
    bookies = _Giving()
    what = whole_ledger(BOOKIES[:3], entry_count=300_000, write_quorum=write_quorum)
    if is_in_place:
        lacking = what.entry_ids if write_quorum == 2 else EntryRuns(what.entry_ids)
        what = replace(what, target=what.fragment.ensemble[what.index], entry_ids=lacking)
    tracemalloc.start()
    try:
        outcome = run(copy_index(what, bookies=cast(Bookies, bookies), digest=DIGEST))
    finally:
        tracemalloc.stop()

    assert outcome.entry_count == bookies.entry_count == len(what.entry_ids)
    assert bookies.memory_bytes < 1_000_000


async def test_a_copy_that_lacks_very_many_entries_is_given_up() -> None:
    bookies = _Giving(fails=True)
    what = whole_ledger(entry_count=10_000_000)

    outcome = await copy_index(what, bookies=cast(Bookies, bookies), digest=DIGEST)

    assert LACKING_MAX < len(outcome.unknown) < 2 * LACKING_MAX
    assert outcome.unknown == tuple(sorted(outcome.unknown))


# --- Copies to a registered bookie that lacks entries (rule S15) ----------------------------------


async def lacking(cluster: Cluster, *entry_ids: int) -> CopyJob:
    """Lose these entries on B2 and return their copy. B2 stores 0, 1, 3, 4, 6, 7 and 9."""
    for entry_id in entry_ids:
        cluster.bookie(B2).lose(LEDGER, entry_id)
    return CopyJob(
        fragment=fragment(), index=1, target=B2, entry_ids=entry_ids, available=frozenset(BOOKIES)
    )


async def test_rule_s15_only_the_missing_entries_are_written_in_place() -> None:
    cluster = await cluster_with_ledger()
    in_place = await lacking(cluster, 4)
    cluster.bookie(B2).lose(LEDGER, 9)

    outcome = await copy(cluster, in_place)

    assert outcome.entry_count == 1
    assert cluster.bookie(B2).entry_ids(LEDGER) == {0, 1, 3, 4, 6, 7}


async def test_rule_s15_the_ends_are_written_last_in_place() -> None:
    cluster = await cluster_with_ledger()
    missing = (0, 4, 6, 9)
    in_place = await lacking(cluster, *missing)

    outcome = await copy(cluster, in_place)

    assert outcome.is_complete
    assert {*missing} <= cluster.bookie(B2).entry_ids(LEDGER)
    assert [
        sorted(e for ids in t.reads.values() for e in ids) for t, _ in cluster.bookies.transfers
    ] == [[4, 6], [0, 9]]


@pytest.mark.parametrize(
    ("missing", "lost", "written", "withheld"),
    [
        pytest.param((0, 4, 6, 9), {4}, {0, 6}, (9,), id="between the ends"),
        pytest.param((0, 4, 6, 9), {0, 4}, {6, 9}, (), id="between them, and the first"),
        pytest.param((0, 4, 6, 9), {4, 9}, {0, 6}, (9,), id="between them, and the last"),
        pytest.param((0, 4, 6, 9), {0}, {4, 6, 9}, (), id="the first"),
        pytest.param((0, 4, 6, 9), {9}, {0, 4, 6}, (), id="the last"),
        pytest.param((0, 9), {0, 9}, set(), (), id="both ends"),
        pytest.param((4, 6, 9), {4}, {6}, (9,), id="between them, and only the last is missing"),
        pytest.param((0, 4, 6), {4}, {6}, (0,), id="between them, and only the first is missing"),
    ],
)
async def test_rule_s15_an_end_that_shows_the_gap_is_not_written(
    missing: tuple[int, ...], lost: set[int], written: set[int], withheld: tuple[int, ...]
) -> None:
    """All other entries that have a copy are written in place."""
    cluster = await cluster_with_ledger()
    in_place = await lacking(cluster, *missing)
    for entry_id in lost:
        others = set(named_by(await cluster.metadata(), entry_id)) - {B2}
        cluster.bookie(others.pop()).lose(LEDGER, entry_id)

    outcome = await copy(cluster, in_place)

    assert cluster.bookie(B2).entry_ids(LEDGER) & {*missing} == written
    assert outcome.withheld == withheld
    assert {*outcome.without_copy} == lost - {*withheld}
    assert not outcome.is_complete


async def test_rule_s15_no_end_is_written_if_a_replica_does_not_answer() -> None:
    cluster = await cluster_with_ledger()
    in_place = await lacking(cluster, 0, 4, 6, 9)
    cluster.bookies.fail(B3, Op.READ, Fault(error=UnavailableError))

    outcome = await copy(cluster, in_place)

    assert outcome.unknown == (4,)
    assert cluster.bookie(B2).entry_ids(LEDGER) & {0, 9} == set()


# --- Chooses the sources for the entries of a copy ------------------------------------------------


def nothing_known(bookie: BookieId) -> SourceHealth:
    return SourceHealth()


def asked(
    what: CopyJob, source_health: Callable[[BookieId], SourceHealth] = nothing_known
) -> dict[BookieId, list[int]]:
    reads, _ = assign(what.entry_ids, {}, what, source_health, CopyOutcome())
    return {bookie: list(entry_ids) for bookie, entry_ids in reads.items()}


@pytest.mark.parametrize(
    ("ensemble", "write_quorum"),
    [
        pytest.param(BOOKIES[:3], 3, id="E 3, W 3"),
        pytest.param(BOOKIES[:3], 2, id="E 3, W 2"),
        pytest.param(BOOKIES[:5], 3, id="E 5, W 3"),
        pytest.param(BOOKIES[:4], 3, id="E 4, W 3"),
        pytest.param(BOOKIES[:2], 2, id="E 2, W 2"),
    ],
)
def test_reads_are_spread_over_the_replicas(
    ensemble: tuple[BookieId, ...], write_quorum: int
) -> None:
    for index in range(len(ensemble)):
        what = whole_ledger(ensemble, entry_count=6_000, write_quorum=write_quorum, index=index)

        reads = asked(what)

        # No replica is asked more than if each entry were divided among those that hold it.
        shares: Counter[BookieId] = Counter()
        for entry_id in what.entry_ids:
            sources = [
                b
                for i, b in enumerate(ensemble)
                if i != index and entry_id in what.fragment.entries_of(i)
            ]
            shares.update(dict.fromkeys(sources, 120 // len(sources)))
        most = max(shares.values()) / 120
        assert sorted(e for ids in reads.values() for e in ids) == list(what.entry_ids)
        assert all(ids == sorted(ids) for ids in reads.values())
        assert max(map(len, reads.values())) <= most + SOURCE_RUN_ENTRIES
        for bookie, entry_ids in reads.items():
            assert set(entry_ids) <= set(what.fragment.entries_of(ensemble.index(bookie)))


def test_consecutive_entries_come_from_one_source() -> None:
    """So that batch reads can bring them."""
    reads = asked(whole_ledger(entry_count=4 * SOURCE_RUN_ENTRIES))

    assert {bookie: len(ids) for bookie, ids in reads.items()} == dict.fromkeys(
        BOOKIES[1:3], 2 * SOURCE_RUN_ENTRIES
    )
    assert all(
        ids[:SOURCE_RUN_ENTRIES] == list(range(ids[0], ids[0] + SOURCE_RUN_ENTRIES))
        for ids in reads.values()
    )


def test_small_ledgers_are_read_from_one_source_each() -> None:
    """Together they use all sources."""
    sources: Counter[BookieId] = Counter()
    for ledger_id in range(100):
        sources.update(asked(whole_ledger(entry_count=10, ledger_id=ledger_id)).keys())

    assert sources == dict.fromkeys(BOOKIES[1:3], 50)


@pytest.mark.parametrize(
    ("first", "second", "least", "most"),
    [
        pytest.param(
            SourceHealth(is_unhealthy=True), SourceHealth(), 0, 0, id="one source failed lately"
        ),
        pytest.param(
            SourceHealth(is_unhealthy=True),
            SourceHealth(waiting_bytes=10**9, reply_s=3.0),
            0,
            0,
            id="one source failed, the other is slow and has much to do",
        ),
        pytest.param(
            SourceHealth(reply_s=0.1), SourceHealth(reply_s=0.01), 300, 600, id="one source is slow"
        ),
        pytest.param(
            SourceHealth(waiting_bytes=10**6),
            SourceHealth(),
            1_000,
            1_700,
            id="one source has much to do",
        ),
        pytest.param(
            SourceHealth(is_unhealthy=True),
            SourceHealth(is_unhealthy=True),
            1_900,
            2_100,
            id="both failed",
        ),
        pytest.param(
            SourceHealth(reply_s=0.0002),
            SourceHealth(reply_s=0.0009),
            1_900,
            2_100,
            id="both are quick",
        ),
    ],
)
def test_sources_are_chosen_by_health_and_load(
    first: SourceHealth, second: SourceHealth, least: int, most: int
) -> None:
    standings = {B2: first, B3: second}

    reads = asked(whole_ledger(entry_count=4_000), standings.__getitem__)

    assert least <= len(reads.get(B2, [])) <= most


def test_a_sole_replica_has_no_short_deadline_but_others_have() -> None:
    alone = whole_ledger(BOOKIES[:2], entry_count=10, write_quorum=2)
    of_two = whole_ledger(entry_count=10)

    for what, have_alternatives in ((alone, False), (of_two, True)):
        found = assign(what.entry_ids, {}, what, nothing_known, CopyOutcome())
        assert found[1] is have_alternatives


def test_unresponsive_replicas_are_asked_again_at_the_end() -> None:
    what, tried, lacking = whole_ledger(entry_count=3), Tried(), CopyOutcome()
    order = []
    entry_ids: list[int] = [0, 1, 2]
    for _ in range(3):
        reads, have_alternatives = assign(entry_ids, tried, what, nothing_known, lacking)
        order += [(bookie, have_alternatives) for bookie in reads]
        failures = {b: dict.fromkeys(ids, Answer.UNKNOWN) for b, ids in reads.items()}
        entry_ids = tried.note(failures)

    last, _ = assign(entry_ids, tried, what, nothing_known, lacking)

    assert order == [(order[0][0], True), (order[1][0], False), (order[0][0], False)]
    assert order[0][0] != order[1][0]
    assert not last
    assert lacking.unknown == (0, 1, 2)


# --- Copies for a bookie of a ledger's open end ---------------------------------------------------


@pytest.mark.parametrize("digest_type", list(DigestType))
def test_only_lac_and_digest_of_the_entry_change(digest_type: DigestType) -> None:
    digest = EntryDigest(digest_type, b"secret")
    entry = digest.pack(ledger_id=7, entry_id=3, lac=1, length=40, payload=b"payload")

    after = replace_lac(entry, 9, digest)

    assert digest.check(after, ledger_id=7, entry_id=3) == EntryHeader(
        ledger_id=7, entry_id=3, lac=9, length=40
    )
    assert digest.payload(after) == b"payload"
    assert len(after) == len(entry)


async def test_entries_missing_at_a_source_are_reported_one_by_one(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=3)
    cluster.bookie(B1).lose(LEDGER, 3)
    cluster.bookie(B1).corrupt(LEDGER, 4)
    transfer = Transfer(ledger_id=LEDGER, digest=DIGEST, reads={B1: range(10)}, target=B4)

    result = await transfer_replacing_lac(cluster.bookies, transfer, 9)

    assert dict(result.failures[B1]) == {3: Answer.ABSENT, 4: Answer.MISMATCH}
    assert result.entry_count == 8
    assert cluster.bookie(B4).entry_ids(LEDGER) == set(range(10)) - {3, 4}


async def test_a_failing_target_is_the_error_and_the_rest_is_unwritten(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, last=200)
    cluster.bookies.fail(B4, Op.ADD, Fault(error=NoAnswerError))
    transfer = Transfer(ledger_id=LEDGER, digest=DIGEST, reads={B1: range(200)}, target=B4)

    result = await transfer_replacing_lac(cluster.bookies, transfer, 9)

    assert isinstance(result.target_error, NoAnswerError)
    assert len(result.unwritten) == 200


# --- A cluster of four ----------------------------------------------------------------------------


async def open_after_a_change() -> Cluster:
    """Return an open ledger on four bookies whose writer has replaced B2 by B4, and continues."""
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger(
        (B1, B2, B3),
        (B1, B4, B3),
        starts=(0, 10),
        last=15,
        write_quorum=3,
        ack_quorum=2,
        state=LedgerState.OPEN,
    )
    await cluster.kill(B2)
    await cluster.mark(B2)
    return cluster


async def test_closed_fragments_are_repaired_in_a_small_cluster() -> None:
    """The ledger is open."""
    cluster = await open_after_a_change()

    async with cluster.node() as node, working(node):
        await asyncio.sleep(60)

    metadata = await cluster.metadata()
    assert metadata.state is LedgerState.OPEN
    assert B2 not in metadata.bookies
    assert all(cluster.good_copies(LEDGER, metadata, entry_id) == 3 for entry_id in range(10))
    assert not cluster.violations
    await cluster.assert_queue_empty()


async def test_the_lac_of_copies_is_behind_by_one_entry_at_most() -> None:
    cluster = await open_after_a_change()

    async with cluster.node() as node, working(node):
        await asyncio.sleep(60)

    copied = [cluster.bookie(B4).read(LEDGER, entry_id) for entry_id in range(10)]
    assert {EntryHeader.of(entry).lac for entry in copied} == {8}


async def test_copies_do_not_hide_the_last_flushed_entry() -> None:
    cluster = await open_after_a_change()
    cluster.bookie(B4).flush()

    async with cluster.node() as node, working(node):
        await asyncio.sleep(60)

    assert cluster.bookie(B4).read(LEDGER, LAST_ENTRY) == entry_bytes(LEDGER, 15)


@pytest.mark.parametrize(("first_entry_id", "lac"), [(0, -1), (1, -1), (2, 0), (10, 8)])
def test_java_recovery_still_finds_the_length_in_an_entry(first_entry_id: int, lac: int) -> None:
    """One acknowledged entry lies beyond the LAC of the copies."""
    ensemble = (B1, B2, B3)
    segments = [Segment(first_entry_id=0, ensemble=ensemble)]
    if first_entry_id:
        segments.append(Segment(first_entry_id=first_entry_id, ensemble=(B1, B2, B4)))
    metadata = LedgerMetadata(
        ensemble_size=3, write_quorum=3, ack_quorum=2, segments=tuple(segments)
    )

    assert lac_for_copies(metadata) == lac
