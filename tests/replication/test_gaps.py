"""Defects of Java's checker and worker, by their numbers in docs/compatibility.md, which ours does
not have."""

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from ledgers.bookies import Answer, Transfer, TransferResult
from ledgers.errors import UnavailableError
from ledgers.model import LedgerState, Segment, fragments
from replication.copy_reader import Verdict, judge, plan_reads
from replication.reasons import Reason
from replication.repair import DONE, OutcomeKind
from replication.settings import ReplicationSettings
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import PASSWORD, Cluster, named_by
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7, closed_ledger
from tests.replication.nodes import LEDGER
from tests.replication.repairs import (
    assert_still_marked,
    blocked_by,
    make_whole,
    once_copied,
    repair,
)

HUGE = 2**31


@pytest.mark.compat("G8", verdict="better", why="it is reported, and the ledger stays marked")
@pytest.mark.parametrize("starts", [(0,), (0, 5)], ids=["the only segment", "the last of two"])
async def test_g8_a_lost_single_entry_of_the_last_segment_is_noticed(
    starts: tuple[int, ...],
) -> None:
    last = starts[-1]
    cluster = await Cluster.start()
    await cluster.write_ledger(*((B1, B2, B3) for _ in starts), starts=starts, last=last)
    for bookie in (B1, B2, B3):
        if last in cluster.bookie(bookie).entry_ids(LEDGER):
            cluster.bookie(bookie).lose(LEDGER, last)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.NO_COPY)
    assert blocked_by(outcome).facts.entry_ids == (last,)
    await assert_still_marked(cluster)


@pytest.mark.compat("G9", verdict="better", why="the position decides which segment is the last")
async def test_g9_an_earlier_segment_on_the_same_bookies_is_closed() -> None:
    same = (B1, B3, B4)
    cluster = await Cluster.start()
    await cluster.write_ledger(
        same, (B1, B2, B5), same, starts=(0, 4, 8), last=9, state=LedgerState.OPEN
    )
    cluster.bookie(B3).lose(LEDGER, 0)

    outcome = await repair(cluster)

    first, _, last = await cluster.ensembles()
    assert outcome.kind is OutcomeKind.DONE
    assert first[1] not in same
    assert last == same
    assert (await cluster.metadata()).state is LedgerState.OPEN

    found = fragments(LEDGER, await cluster.metadata(), lac=9)
    assert [f.is_closed for f in found] == [True, True, False]


@pytest.mark.compat("G10", verdict="better", why="a read-only bookie counts as registered")
async def test_g10_an_idle_writer_is_not_fenced_for_a_read_only_bookie(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.OPEN)
    await cluster.register_again(B2, is_read_only=True)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    assert (await cluster.metadata()).state is LedgerState.OPEN
    assert (await cluster.manager.read(LEDGER)).version == 0


@pytest.mark.compat("G11", verdict="better", why="missing entries are written back to the bookie")
async def test_g11_a_live_bookie_gets_its_entries_back() -> None:
    """There is no other target."""
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.write_ledger((B1, B2, B3))
    for entry_id in (0, 3, 9):
        cluster.bookie(B2).lose(LEDGER, entry_id)

    await make_whole(cluster)


@pytest.mark.compat(
    "G12", verdict="better", why="digests of a configurable share of the entries are verified"
)
async def test_g12_damage_in_the_middle_is_found_by_a_full_check(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    cluster.bookie(B2).corrupt(LEDGER, 4)

    await make_whole(cluster, settings=ReplicationSettings(checked_share=1))

    assert B2 not in (await cluster.metadata()).bookies


@pytest.mark.compat("G17", verdict="better", why="by bookie index, in the current segment")
async def test_g17_a_bookie_is_replaced_only_where_it_was_judged(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), (B2, B3, B1), starts=(0, 5), write_quorum=3)
    cluster.bookie(B2).corrupt(LEDGER, 0)

    outcome = await repair(cluster)

    (b1, other, b3), second = await cluster.ensembles()
    assert outcome.kind is OutcomeKind.DONE
    assert (b1, b3) == (B1, B3)
    assert other not in (B1, B2, B3)
    assert second == (B2, B3, B1)


@pytest.mark.compat("G17", verdict="better", why="the repair starts another round")
async def test_g17_a_segment_that_has_disappeared_is_no_crash(cluster: Cluster) -> None:
    await cluster.write_ledger(
        (B1, B2, B3), (B1, B4, B3), starts=(0, 5), last=4, state=LedgerState.OPEN
    )
    await cluster.kill(B2)
    await cluster.mark(B2)

    async def replace_first(transfer: Transfer) -> None:
        versioned = await cluster.manager.read(LEDGER)
        for entry_id in range(5):
            cluster.put(LEDGER, entry_id, B5, B6, B7)
        segments = (
            Segment(first_entry_id=0, ensemble=(B5, B6, B7)),
            Segment(first_entry_id=3, ensemble=(B5, B6, B7)),
            *versioned.metadata.segments[1:],
        )
        changed = replace(versioned.metadata, segments=segments)
        await cluster.manager.write(LEDGER, changed, read_as=versioned)

    once_copied(cluster, replace_first)
    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    assert (await cluster.ensembles())[:2] == [(B5, B6, B7), (B5, B6, B7)]


@pytest.mark.compat("G20", "G21", verdict="better", why="integers have no size limit here")
def test_g20_g21_entries_beyond_two_to_the_31_are_read_correctly() -> None:
    """They are read from the bookies that store them."""
    ledger = closed_ledger((B1, B2, B3), last_entry_id=3 * HUGE)

    [found] = fragments(LEDGER, ledger)
    asked = plan_reads([found], available={B1, B2, B3}, suspects={B3})

    # E 3, W 2: entry e is on the indexes e and e + 1 modulo 3, and 3 * 2^31 is on 0 and 1.
    ends = {bookie: [run[0], run[-1]] for bookie, (run,) in asked.items()}
    assert ends == {B1: [0, 3 * HUGE], B2: [0, 3 * HUGE], B3: [1, 3 * HUGE - 1]}
    assert len(asked[B3][0]) == 2 * HUGE


@pytest.mark.compat("G20", verdict="better", why="integers have no size limit here")
async def test_g20_a_ledger_with_such_entries_is_repaired() -> None:
    start, last = HUGE - 4, HUGE + 5
    cluster = await Cluster.start()
    ledger = closed_ledger((B5, B6, B7), (B1, B2, B3), starts=(0, start), last_entry_id=last)
    before, found = fragments(LEDGER, ledger)
    for index in range(3):
        entries = before.entries_of(index)
        for entry_id in (entries[0], entries[-1]):  # two milliards would take their time
            cluster.put(LEDGER, entry_id, before.ensemble[index])
        for entry_id in found.entries_of(index):
            cluster.put(LEDGER, entry_id, found.ensemble[index])
    await cluster.manager.create(LEDGER, replace(ledger, password=PASSWORD))
    cluster.tree.watcher = None  # it would look at each of them
    await cluster.kill(B2)

    outcome = await repair(cluster)

    _, (_, target, _) = await cluster.ensembles()
    stored = set(found.entries_of(1))
    assert (outcome.kind, outcome.entry_count) == (OutcomeKind.DONE, len(stored))
    assert {i for i in cluster.bookie(target).entry_ids(LEDGER) if i >= start} == stored


@pytest.mark.compat(
    "G22", verdict="better", why="every request has a timeout and ends with a result"
)
async def test_g22_an_unresponsive_bookie_delays_only_its_own_ledger(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    cluster.bookies.fail(B2, Op.READ, Fault(delay_s=5, error=UnavailableError))

    async with asyncio.timeout(60):
        outcome = await repair(cluster)

    assert outcome.reason is Reason.NO_ANSWER


@pytest.mark.compat(
    "G23", verdict="better", why="answers are values, and are judged when all have arrived"
)
def test_g23_a_verdict_needs_all_answers_at_once() -> None:
    found = fragments(LEDGER, closed_ledger((B1, B2, B3)))

    findings = judge(found, {}, available={B1, B2})

    assert [f.verdict for f in findings] == [
        Verdict.UNKNOWN,
        Verdict.UNKNOWN,
        Verdict.BOOKIE_ABSENT,
    ]


@pytest.mark.compat("G25", verdict="better", why="each entry has its own result")
async def test_g25_entries_missing_at_a_source_come_from_another(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=3)
    for entry_id in (3, 4, 5):
        cluster.bookie(B1).lose(LEDGER, entry_id)
    cluster.bookie(B3).corrupt(LEDGER, 7)
    await cluster.kill(B2)

    outcome = await repair(cluster, settings=ReplicationSettings())

    refused = [
        (bookie, entry_id, answer)
        for _, result in copies(cluster)
        for bookie, answers in result.failures.items()
        for entry_id, answer in answers.items()
    ]
    assert outcome.kind is OutcomeKind.DONE
    assert {answer for _, _, answer in refused} <= {Answer.ABSENT, Answer.MISMATCH}
    assert refused
    metadata = await cluster.metadata()
    for (
        bookie,
        entry_id,
        _,
    ) in refused:  # missing entries that the copy found on the way are repaired too
        is_named = bookie in named_by(metadata, entry_id)
        assert not is_named or cluster.has_good_copy(bookie, LEDGER, entry_id)


def copies(cluster: Cluster) -> list[tuple[Transfer, TransferResult]]:
    return [(t, result) for t, result in cluster.bookies.transfers if t.target is not None]


@pytest.mark.compat(
    "G28", verdict="better", why="the least loaded bookie first; among equals the one on this host"
)
async def test_g28_the_targets_of_one_ledger_are_spread(cluster: Cluster) -> None:
    starts = tuple(range(0, 40, 10))
    await cluster.write_ledger(*((B1, B2, B3) for _ in starts), starts=starts, last=39)
    await cluster.kill(B2)

    outcome = await repair(cluster, local=B4)

    targets = [ensemble[1] for ensemble in await cluster.ensembles()]
    assert outcome == structs.replace(
        DONE, entry_count=outcome.entry_count, entry_bytes=outcome.entry_bytes
    )
    assert sorted(targets) == [B4, B5, B6, B7]
