"""Repairs of ledgers with entries that have no good copy: the rest is repaired."""

import asyncio

import pytest

from ledgers.errors import UnavailableError
from ledgers.model import BookieId, LedgerState
from replication.commit import LOST_PLACES_MAX
from replication.reasons import Facts, Reason
from replication.repair import SPLIT_AFTER_S, OutcomeKind
from replication.settings import ReplicationSettings
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import WRONG_DIGEST, Cluster
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6
from tests.replication.nodes import LEDGER, ROOT, working
from tests.replication.repairs import (
    VERSION_1,
    assert_still_marked,
    blocked_by,
    drain,
    make_whole,
    order_maintenance,
    repair,
    repair_late,
)


async def segments(cluster: Cluster) -> list[tuple[int, tuple[BookieId, ...]]]:
    return [(s.first_entry_id, s.ensemble) for s in (await cluster.metadata()).segments]


async def test_a_segment_is_split_once_around_an_entry_without_copy(cluster: Cluster) -> None:
    """The ledger is whole when the bookie returns."""
    await cluster.write_ledger((B1, B2))
    cluster.bookie(B1).lose(LEDGER, 4)
    await cluster.kill(B2)

    outcome = await repair_late(cluster, local=B3)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.NO_COPY)
    assert blocked_by(outcome).facts.entry_ids == (4,)
    assert await segments(cluster) == [(0, (B1, B3)), (4, (B1, B2)), (5, (B1, B3))]
    assert not cluster.violations
    await assert_still_marked(cluster)

    before, copied_count = await cluster.manager.read(LEDGER), cluster.bookies.copied_count
    again = await repair_late(cluster)

    assert again.reason is Reason.NO_COPY
    assert (await cluster.manager.read(LEDGER)).version == before.version
    assert cluster.bookies.copied_count == copied_count

    await cluster.revive(B2)
    whole = await repair(cluster)

    assert (whole.kind, whole.entry_count) == (OutcomeKind.DONE, 1)
    assert await segments(cluster) == [(0, (B1, B3)), (4, (B1, B2)), (5, (B1, B3))]
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


async def test_a_split_keeps_all_entries_that_one_bookie_stored_alone(cluster: Cluster) -> None:
    """A striped ledger lost two neighbours."""
    await cluster.write_ledger((B1, B2, B3, B4), last=11)
    await cluster.kill(B2, B3)  # entries 1, 5 and 9 are on these two

    outcome = await repair_late(cluster, local=B5)

    metadata = await cluster.metadata()
    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.NO_COPY)
    for entry_id in range(12):
        copies = cluster.good_copies(LEDGER, metadata, entry_id)
        alive = [b for b in metadata.segment_of(entry_id).ensemble if b not in (B2, B3)]
        assert copies == 2, "those on the lost bookies count, too: they are not wiped"
        assert (len(alive) == 4) is (entry_id not in (1, 5, 9))
    assert not cluster.violations

    await cluster.revive(B3)
    again = await repair(cluster)
    assert again.kind is OutcomeKind.DONE
    assert B2 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()


async def test_a_lost_entry_is_cut_out_and_the_rest_copied_in_place(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2))
    for bookie in (B1, B2):
        cluster.bookie(bookie).lose(LEDGER, 4)
    for entry_id in (0, 3, 9):
        cluster.bookie(B2).lose(LEDGER, entry_id)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.NO_COPY)
    assert await segments(cluster) == [(0, (B1, B2)), (4, (B1, B2)), (5, (B1, B2))]
    assert cluster.bookie(B2).entry_ids(LEDGER) == set(range(10)) - {4}
    await assert_still_marked(cluster)


async def test_a_ledger_with_too_many_gaps_is_not_split() -> None:
    count = LOST_PLACES_MAX + 1
    cluster = await Cluster.start()
    before = await cluster.write_ledger((B1, B2), last=3 * count)
    for place in range(count):
        cluster.bookie(B1).lose(LEDGER, 3 * place + 1)
    await cluster.kill(B2)

    outcome = await repair_late(cluster)

    assert outcome.reason is Reason.NO_COPY
    assert (await cluster.manager.read(LEDGER)).version == before.version


async def test_as_many_gaps_as_allowed_are_cut_out(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), last=3 * LOST_PLACES_MAX)
    for place in range(LOST_PLACES_MAX):
        cluster.bookie(B1).lose(LEDGER, 3 * place + 1)
    await cluster.kill(B2)

    await repair_late(cluster)

    assert len(await segments(cluster)) == 2 * LOST_PLACES_MAX + 1
    assert not cluster.violations


async def test_nothing_is_cut_out_while_a_bookie_is_in_maintenance(cluster: Cluster) -> None:
    before = await cluster.write_ledger((B1, B2))
    cluster.bookie(B1).lose(LEDGER, 0)
    await order_maintenance(cluster, B2, for_s=2 * SPLIT_AFTER_S)
    await cluster.kill(B2)

    outcome = await repair_late(cluster)

    assert outcome.reason is Reason.NO_COPY
    assert (await cluster.manager.read(LEDGER)).version == before.version


async def test_rule_s5_nothing_is_cut_out_if_a_bookie_is_unresponsive(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), last=5, write_quorum=3)
    for bookie in (B1, B2):
        cluster.bookie(bookie).lose(LEDGER, 2)
    await cluster.kill(B1)
    cluster.bookies.fail(B3, Op.READ, Fault(error=UnavailableError))

    outcome = await repair(cluster)

    assert outcome.reason is Reason.NO_ANSWER
    assert len(await segments(cluster)) == 1


async def test_rule_s7_nothing_is_cut_out_if_the_key_matches_nothing(cluster: Cluster) -> None:
    before = await cluster.write_ledger((B1, B2), **VERSION_1)
    await drain(cluster, B1, B2)  # so that no bookie is asked before the copy

    outcome = await repair(cluster, fallback=WRONG_DIGEST)

    assert outcome.reason is Reason.NO_COPY
    assert (await cluster.manager.read(LEDGER)).version == before.version


async def test_a_ledger_that_is_not_closed_is_not_split(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), (B3, B4), starts=(0, 6), last=9, state=LedgerState.OPEN)
    cluster.bookie(B1).lose(LEDGER, 2)
    await cluster.kill(B2)

    outcome = await repair_late(cluster)

    assert outcome.reason is Reason.NO_COPY
    assert await segments(cluster) == [(0, (B1, B2)), (6, (B3, B4))]


@pytest.mark.parametrize("write_quorum", [1, 2, 3])
async def test_a_split_and_a_later_loss_leave_no_copy_behind(write_quorum: int) -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=write_quorum, last=20)
    for bookie in (B1, B2, B3):
        if 10 in cluster.bookie(bookie).entry_ids(LEDGER):
            cluster.bookie(bookie).lose(LEDGER, 10)
    await drain(cluster, B2)
    await repair(cluster, local=B4)
    await drain(cluster, B4)
    if write_quorum > 1:
        await cluster.kill(B3)

    outcome = await repair(cluster, local=B6)

    metadata = await cluster.metadata()
    assert outcome.reason is Reason.NO_COPY
    for entry_id in set(range(21)) - {10}:
        assert cluster.good_copies(LEDGER, metadata, entry_id) == write_quorum, entry_id
    assert len(metadata.segments) == 3
    assert not cluster.violations


@pytest.mark.parametrize("last", [36, 37, 38])
@pytest.mark.parametrize("reformatted", [(B1, B2), (B2, B3), (B1, B3)])
async def test_two_bookies_without_files_get_back_entries_of_the_third(
    cluster: Cluster, reformatted: tuple[BookieId, BookieId], last: int
) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=2, last=last)
    had = {bookie: cluster.bookie(bookie).entry_ids(LEDGER) for bookie in (B1, B2, B3)}
    for bookie in reformatted:
        for entry_id in had[bookie]:
            cluster.bookie(bookie).lose(LEDGER, entry_id)
    lost = had[reformatted[0]] & had[reformatted[1]]

    first = await repair(cluster)
    again = await repair(cluster)

    assert first.reason is again.reason is Reason.NO_COPY
    await assert_still_marked(cluster)
    for bookie in reformatted:
        absent = had[bookie] - cluster.bookie(bookie).entry_ids(LEDGER)
        assert lost <= absent
        assert len(absent - lost) <= 1
        assert absent & {min(had[bookie]), max(had[bookie])}, "a check of the ends tells"
        blocked = blocked_by(again)
        counts = [each.facts.withheld_count for each in (blocked, *blocked.besides)]
        assert any(counts) or not absent - lost

    for entry_id in lost:
        cluster.put(LEDGER, entry_id, reformatted[0])
    await make_whole(cluster)


async def test_useless_copies_of_a_refused_move_are_reported() -> None:
    count = LOST_PLACES_MAX + 1
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2), last=3 * count)
    for place in range(count):
        cluster.bookie(B1).lose(LEDGER, 3 * place + 1)
    await cluster.kill(B2)

    outcome = await repair(cluster)

    (withheld,) = blocked_by(outcome).besides
    assert withheld.facts == Facts(withheld_count=2 * count + 1)


# --- Bookies that are absent for a moment ---------------------------------------------------------


async def test_two_bookies_restarted_together_leave_one_segment(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), last=29)
    await cluster.kill(B1, B2)
    await cluster.mark(B1, B2)
    async with cluster.node() as node, working(node):
        await asyncio.sleep(60)
        assert len(await segments(cluster)) == 1
        await cluster.revive(B1)
        await cluster.revive(B2)

        await asyncio.sleep(60)

    assert len(await segments(cluster)) == 1
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


async def test_the_age_of_the_youngest_absence_decides() -> None:
    """B3 is lost for hours, and nothing can replace it. B1 restarts when a new bookie arrives."""
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.write_ledger((B1, B2, B3), last=29)
    await cluster.mark(B3)
    await cluster.kill(B3)
    async with cluster.node() as node, working(node):
        await asyncio.sleep(2 * SPLIT_AFTER_S)
        await cluster.register(B4)
        await cluster.kill(B1)
        await asyncio.sleep(30)
        assert len(await segments(cluster)) == 1
        await cluster.revive(B1)

        await asyncio.sleep(600)

    assert await segments(cluster) == [(0, (B1, B2, B4))]
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


async def test_after_an_hour_the_rest_of_a_ledger_is_repaired(cluster: Cluster) -> None:
    """Without the absent bookies."""
    await cluster.write_ledger((B1, B2, B3), last=5)
    await cluster.kill(B1, B2)
    await cluster.mark(B1, B2)

    settings = ReplicationSettings(retry_max_s=40)  # so that a try falls into the last ten minutes
    async with cluster.node(settings=settings) as node, working(node):
        await asyncio.sleep(SPLIT_AFTER_S + 600)

    assert len(await segments(cluster)) > 1
    metadata = await cluster.metadata()
    assert cluster.good_copies(LEDGER, metadata, 1) == 2, "B3 had the only copy that was there"


async def test_a_bookie_without_a_cookie_is_not_waited_for(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), last=5)
    await cluster.kill(B1, B2)
    for bookie in (B1, B2):
        await cluster.store.delete(f"{ROOT}/cookies/{bookie}")
    await cluster.mark(B1, B2)

    async with cluster.node() as node, working(node):
        await asyncio.sleep(60)

    assert len(await segments(cluster)) > 1


async def test_equal_segments_are_joined_if_nothing_is_missing() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger((B1, B2, B3), (B1, B2, B3), starts=(0, 10), last=29)
    await cluster.kill(B3)

    await repair(cluster)

    assert await segments(cluster) == [(0, (B1, B2, B4))]
    await cluster.assert_whole()


async def test_equal_segments_of_a_whole_ledger_are_joined(cluster: Cluster) -> None:
    """As after a split around entries whose copies have returned."""
    await cluster.write_ledger((B1, B2, B3), (B1, B2, B3), starts=(0, 10), last=29)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.entry_count) == (OutcomeKind.DONE, 0)
    assert await segments(cluster) == [(0, (B1, B2, B3))]
    await cluster.assert_queue_empty()


async def test_equal_segments_around_a_lost_entry_stay_separate() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger((B1, B2, B3), (B1, B2, B3), starts=(0, 10), last=29)
    for bookie in (B1, B2):  # entry 9 is theirs
        cluster.bookie(bookie).lose(LEDGER, 9)
    await cluster.kill(B3)

    await repair(cluster)

    assert len(await segments(cluster)) > 1
