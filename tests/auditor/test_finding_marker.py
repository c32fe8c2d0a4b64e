"""Findings of checks are recorded until their mark is deleted."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest

from auditor.fsck.damage_marker import damaged_ledgers
from auditor.mark_reasons import (
    SWEEP_S,
    UNREADABLE_FINDING,
    Finding,
    Findings,
    JavaVisibility,
    java_visibility,
    read_findings,
)
from auditor.settings import ChecksSettings
from ledgers.clock import Clock
from ledgers.errors import UnavailableError
from ledgers.model import BookieId, Fragment
from ledgers.store import Delete, MetadataStore, Operation
from replication.copy_reader import ReadFailures
from replication.entry_runs import EntryRuns
from tests.auditor.auditing import leading
from tests.auditor.checking import check_each, checker
from tests.fsck.inspections import inspect_twice
from tests.fsck.test_damage_marker import publishing
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import Cluster, shut_out
from tests.replication.java_like import javas_worker
from tests.replication.ledger_values import B1, B2, B3, B4, fragment
from tests.replication.nodes import LEDGER, PATHS, working


class Ahead:
    """A clock that is an hour and a half ahead."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now_s(self) -> float:
        return self._clock.now_s()

    def wall_ms(self) -> int:
        return self._clock.wall_ms() + 5_400_000

    async def sleep(self, duration_s: float) -> None:
        await self._clock.sleep(duration_s)


@asynccontextmanager
async def finding(cluster: Cluster) -> AsyncIterator[Findings]:
    """Yield a leader's findings, which are swept periodically."""
    async with leading(cluster) as leader:
        findings = Findings(leader.store, leader.batcher, PATHS, cluster.clock)
        sweeping = asyncio.create_task(findings.run())
        yield findings
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)


async def test_a_finding_can_be_read_by_all_nodes(cluster: Cluster) -> None:
    async with finding(cluster) as findings:
        await findings.write(7, "all-ledgers", {B2, B1}, "entry 3 is corrupt")

    assert await read_findings(cluster.store, PATHS, [6, 7]) == {
        7: Finding(
            check="all-ledgers",
            bookies=(B1, B2),
            detail="entry 3 is corrupt",
            found_ms=cluster.clock.wall_ms(),
        )
    }


async def test_a_deleted_directory_is_created_again(cluster: Cluster) -> None:
    async with finding(cluster) as findings:
        await findings.write(6, "fsck", {B1}, "missing")
        for path in (PATHS.finding(6), PATHS.findings):
            await cluster.store.delete(path)

        await asyncio.gather(*(findings.write(n, "fsck", {B1}, "missing") for n in (7, 8)))

    assert sorted(await read_findings(cluster.store, PATHS, range(9))) == [7, 8]


async def test_a_directory_that_keeps_disappearing_is_an_error(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write ends with an error, not in an endless loop."""
    async with finding(cluster) as findings:

        async def vanish(store: MetadataStore, path: str) -> None:
            assert path == PATHS.findings

        monkeypatch.setattr("replication.records.ensure_znode", vanish)
        with pytest.raises(UnavailableError):
            await findings.write(7, "fsck", {B1}, "missing")


async def test_a_later_finding_replaces_the_earlier_one(cluster: Cluster) -> None:
    """The bookies of the earlier one stay in it."""
    async with finding(cluster) as findings:
        await findings.write(7, "all-ledgers", {B1}, "first")
        await findings.write(7, "placement", (), "second")

    found = await read_findings(cluster.store, PATHS, [7])
    assert (found[7].check, found[7].detail) == ("placement", "second")
    assert found[7].bookies == (B1,), "the damage of the first finding is not repaired yet"


async def test_two_concurrent_findings_name_the_bookies_of_both(cluster: Cluster) -> None:
    async with finding(cluster) as findings:
        await asyncio.gather(
            findings.write(7, "fsck", {B1}, "entry 3 is corrupt"),
            findings.write(7, "all-ledgers", {B2}, "entry 5 is missing"),
        )

    found = await read_findings(cluster.store, PATHS, [7])
    assert found[7].bookies == (B1, B2)


async def test_an_unreadable_finding_is_overwritten(cluster: Cluster) -> None:
    async with finding(cluster) as findings:
        await findings.write(7, "fsck", {B1}, "entry 3 is corrupt")
        await cluster.store.set(PATHS.finding(7), b"?", version=-1)

        await findings.write(7, "fsck", {B2}, "entry 5 is missing")

    assert (await read_findings(cluster.store, PATHS, [7]))[7].bookies == (B2,)


async def test_a_finding_is_deleted_after_the_mark_of_its_ledger(cluster: Cluster) -> None:
    async with finding(cluster) as findings:
        await findings.write(LEDGER, "all-ledgers", {B1}, "missing")
        await cluster.mark(B1)
        await asyncio.sleep(3 * SWEEP_S)
        assert LEDGER in await read_findings(cluster.store, PATHS, [LEDGER])

        await cluster.store.delete(PATHS.mark(LEDGER))
        await asyncio.sleep(2 * SWEEP_S)

    assert await cluster.store.exists(PATHS.finding(LEDGER)) is None


async def test_a_finding_whose_mark_is_not_yet_made_stays(cluster: Cluster) -> None:
    async with finding(cluster) as findings:
        await asyncio.sleep(SWEEP_S - 1)
        await findings.write(7, "all-ledgers", {B1}, "missing")
        await asyncio.sleep(2)

    assert 7 in await read_findings(cluster.store, PATHS, [7])


async def test_a_finding_that_is_written_again_during_a_sweep_stays(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with finding(cluster) as findings:
        await asyncio.sleep(5)
        await findings.write(7, "all-ledgers", {B1}, "first")
        # Sweeps of its own come before it is old enough, and later.
        await asyncio.sleep(SWEEP_S + 1)
        commit = findings.batcher.commit

        async def written_first(operations):  # type: ignore[no-untyped-def]
            monkeypatch.undo()
            await findings.write(7, "all-ledgers", {B1}, "second")
            return await commit(operations)

        monkeypatch.setattr(findings.batcher, "commit", written_first)
        await findings.sweep()

    assert (await read_findings(cluster.store, PATHS, [7]))[7].detail == "second"


async def test_a_failed_sweep_is_made_up_for_by_the_next_one(cluster: Cluster) -> None:
    losses = 1

    def lose_deletions(store: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
        nonlocal losses
        if losses and any(isinstance(each, Delete) for each in operations):
            losses -= 1
            return Fault.LOST_REQUEST
        return None

    async with finding(cluster) as findings:
        await findings.write(7, "all-ledgers", {B1}, "missing")
        cluster.tree.faults = lose_deletions
        await asyncio.sleep(4 * SWEEP_S)

    assert losses == 0
    assert await read_findings(cluster.store, PATHS, [7]) == {}


async def test_many_findings_are_swept_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auditor.mark_reasons.SWEPT_PER_S", 0.1)
    cluster = await Cluster.start()
    async with finding(cluster) as findings:
        for ledger_id in range(60):
            await findings.write(ledger_id, "fsck", {B1}, "missing")
            await cluster.mark(B1, ledger_id=ledger_id)
        await asyncio.sleep(SWEEP_S + 1)  # a first look, at all of them
        await cluster.store.delete(PATHS.mark(7))

        await asyncio.sleep(600)
        assert 7 in await read_findings(cluster.store, PATHS, [7])
        await asyncio.sleep(600 + 2 * SWEEP_S)
        assert 7 not in await read_findings(cluster.store, PATHS, [7])


async def test_denied_access_to_a_finding_does_not_end_the_sweep(cluster: Cluster) -> None:
    async with leading(cluster) as leader:
        findings = Findings(leader.store, leader.batcher, PATHS, cluster.clock)
        for ledger_id in (7, 8):
            await findings.write(ledger_id, "all-ledgers", {B1}, "missing")
        shut_out(leader.store, PATHS.finding(7))

        for _ in range(2):
            assert await findings.sweep() == 2

    assert [*await read_findings(cluster.store, PATHS, [7, 8])] == [7]


async def test_denied_access_to_all_findings_does_not_end_the_term(cluster: Cluster) -> None:
    async with leading(cluster) as leader:
        findings = Findings(leader.store, leader.batcher, PATHS, cluster.clock)
        await findings.write(7, "all-ledgers", {B1}, "missing")
        shut = shut_out(leader.store, PATHS.findings)
        sweeping = asyncio.create_task(findings.run())
        await asyncio.sleep(3 * SWEEP_S)
        assert not sweeping.done()

        shut.clear()
        await asyncio.sleep(3 * SWEEP_S)
        sweeping.cancel()

    assert await read_findings(cluster.store, PATHS, [7]) == {}


async def test_a_clock_ahead_of_zookeepers_makes_no_finding_old(cluster: Cluster) -> None:
    async with leading(cluster) as leader:
        findings = Findings(leader.store, leader.batcher, PATHS, Ahead(cluster.clock))
        await findings.write(7, "all-ledgers", {B1}, "missing")

        await findings.sweep()

    assert 7 in await read_findings(cluster.store, PATHS, [7])


@pytest.mark.parametrize("data", [b"", b"[]", b'{"version": 1, "check": 5}'])
async def test_an_unreadable_finding_may_be_damage(cluster: Cluster, data: bytes) -> None:
    await cluster.store.create(PATHS.finding(7), data, with_parents=True)

    assert await read_findings(cluster.store, PATHS, [7]) == {7: UNREADABLE_FINDING}
    assert UNREADABLE_FINDING.may_be_damage


async def test_a_finding_over_an_unreadable_one_keeps_the_bookies_of_the_marks() -> None:
    """A worker treated the unreadable finding as damage on each of them."""
    cluster = await Cluster.start()
    await cluster.mark(B2, ledger_id=7)
    await cluster.store.create(PATHS.finding(7), b"[]", with_parents=True)

    async with finding(cluster) as findings:
        await findings.write(7, "all-ledgers", {B1}, "missing")

    found = await read_findings(cluster.store, PATHS, [7])
    assert (found[7].check, found[7].bookies) == ("all-ledgers", (B1, B2))


async def test_a_finding_that_was_deleted_meanwhile_is_no_error(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with finding(cluster) as findings:
        await findings.write(7, "all-ledgers", {B1}, "first")
        commit = findings.batcher.commit

        async def swept_first(operations):  # type: ignore[no-untyped-def]
            try:
                return await commit(operations)
            finally:
                gone = [Delete(path=PATHS.finding(7))]
                if await cluster.store.exists(PATHS.finding(7)):
                    cluster.tree.apply(cluster.store.session_id, gone)

        monkeypatch.setattr(findings.batcher, "commit", swept_first)
        await findings.write(7, "all-ledgers", {B1}, "second")


async def test_denied_access_to_a_finding_hides_no_other(cluster: Cluster) -> None:
    async with finding(cluster) as findings:
        await findings.write(7, "all-ledgers", {B1}, "first")
        await findings.write(8, "all-ledgers", {B2}, "second")
        shut_out(cluster.store, PATHS.finding(7))

        found = await read_findings(cluster.store, PATHS, [7, 8])

    assert found[7] is UNREADABLE_FINDING
    assert found[8].bookies == (B2,)


ALL = frozenset({B1, B2, B3, B4})


def part(
    *ensemble: BookieId, first: int = 0, last: int | None = 9, is_closed: bool = True
) -> Fragment:
    """Return a fragment with a write quorum of 2."""
    return fragment(ensemble, first=first, last=last, is_closed=is_closed)


def lacks(*entry_ids: int) -> ReadFailures:
    return ReadFailures(absent=EntryRuns(entry_ids))


def holds_damaged(*entry_ids: int) -> ReadFailures:
    return ReadFailures(mismatched=EntryRuns(entry_ids))


def visibility(
    visible: tuple[BookieId, ...] = (), hidden: tuple[BookieId, ...] = ()
) -> JavaVisibility:
    return JavaVisibility(visible=frozenset(visible), hidden=frozenset(hidden))


ONE = (part(B1, B2),)
STRIPED = (part(B1, B2, B3),)
"""B1 stores 0, 2, 3, 5, 6, 8, 9; B2 0, 1, 3, 4, 6, 7, 9; B3 1, 2, 4, 5, 7, 8."""
TWO = (part(B1, B2, last=4), part(B1, B3, first=5))
OPEN = (part(B1, B2, is_closed=False),)


@pytest.mark.parametrize(
    ("fragments", "damage", "expected"),
    [
        pytest.param(ONE, {B1: lacks(0)}, visibility(visible=(B1,)), id="its first entry"),
        pytest.param(ONE, {B1: lacks(9)}, visibility(visible=(B1,)), id="its last"),
        pytest.param(ONE, {B1: lacks(1, 8)}, visibility(hidden=(B1,)), id="between the ends"),
        pytest.param(
            ONE, {B1: lacks(0, 4)}, visibility(visible=(B1,)), id="both: the part is copied whole"
        ),
        pytest.param(
            ONE, {B1: holds_damaged(0)}, visibility(hidden=(B1,)), id="no digest is checked"
        ),
        pytest.param(
            STRIPED, {B3: lacks(1)}, visibility(visible=(B3,)), id="the first that the index stores"
        ),
        pytest.param(
            STRIPED, {B3: lacks(8)}, visibility(visible=(B3,)), id="the last that it stores"
        ),
        pytest.param(
            STRIPED, {B2: lacks(1)}, visibility(hidden=(B2,)), id="which is between another's ends"
        ),
        pytest.param(
            TWO, {B1: lacks(5)}, visibility(visible=(B1,)), id="the first of a later fragment"
        ),
        pytest.param(
            TWO,
            {B1: lacks(0, 7)},
            visibility((B1,), (B1,)),
            id="Java sees one fragment and not the other",
        ),
        pytest.param(
            TWO,
            {B2: lacks(4), B3: lacks(7)},
            visibility((B2,), (B3,)),
            id="Java sees one bookie and not the other",
        ),
        pytest.param(
            OPEN, {B1: lacks(0)}, visibility(visible=(B1,)), id="the beginning of an open fragment"
        ),
        pytest.param(OPEN, {B1: lacks(9)}, visibility(hidden=(B1,)), id="its end moves on"),
        pytest.param(
            (part(B1, B2, last=None, is_closed=False),),
            {B1: lacks(0)},
            visibility(hidden=(B1,)),
            id="the end is unknown",
        ),
        pytest.param(ONE, {B4: lacks(0)}, visibility(hidden=(B4,)), id="a bookie of no fragment"),
        pytest.param((part(B1, B2, last=-1),), {}, visibility(), id="an empty fragment"),
    ],
)
def test_java_sees_losses_at_the_ends_of_a_fragment(
    fragments: tuple[Fragment, ...],
    damage: Mapping[BookieId, ReadFailures],
    expected: JavaVisibility,
) -> None:
    assert java_visibility(fragments, damage, registered=ALL) == expected


def test_java_sees_all_copies_of_a_bookie_that_is_not_registered() -> None:
    damage = {B1: lacks(4), B2: lacks(4)}

    assert java_visibility(ONE, damage, registered={B2}) == visibility((B1,), (B2,))


# --- Findings of checks and fsck are repaired -----------------------------------------------------

EVERY = ChecksSettings(all_ledgers_share=1.0)
SOON_S = 1.0
LONG_S = 10.0


async def all_ledgers(cluster: Cluster) -> None:
    async with checker(cluster, settings=EVERY) as made:
        await check_each(made.all_ledgers, [LEDGER])


async def replicas(cluster: Cluster) -> None:
    async with checker(cluster) as made:
        await check_each(made.replicas, [LEDGER])


async def fsck(cluster: Cluster) -> None:
    verdict = await inspect_twice(cluster)
    assert verdict is not None
    async with publishing(cluster) as publisher:
        await publisher.mark(damaged_ledgers([verdict]))


by_each = pytest.mark.parametrize("find", [all_ledgers, replicas, fsck])
Find = Callable[[Cluster], Awaitable[None]]


async def a_ledger() -> Cluster:
    """Return a cluster with a ledger whose entries 0 to 9 are each on all three bookies."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2)
    return cluster


def lose_middle(cluster: Cluster) -> None:
    cluster.bookie(B2).lose(LEDGER, 4)


def damage_middle(cluster: Cluster) -> None:
    cluster.bookie(B2).corrupt(LEDGER, 4)


def damage_end(cluster: Cluster) -> None:
    """Damage an end. Java's LedgerChecker verifies no digest."""
    cluster.bookie(B2).corrupt(LEDGER, 9)


def lose_an_end_and_a_middle(cluster: Cluster) -> None:
    cluster.bookie(B1).lose(LEDGER, 0)
    cluster.bookie(B2).lose(LEDGER, 4)


def lose_both_on_one(cluster: Cluster) -> None:
    cluster.bookie(B2).lose(LEDGER, 0)
    cluster.bookie(B2).lose(LEDGER, 4)


by_harm = pytest.mark.parametrize(
    "harm", [lose_middle, damage_middle, damage_end, lose_an_end_and_a_middle, lose_both_on_one]
)


@by_each
@by_harm
async def test_damage_that_javas_worker_does_not_see_is_repaired(
    harm: Callable[[Cluster], None], find: Find
) -> None:
    cluster = await a_ledger()
    harm(cluster)

    async with javas_worker(cluster):
        await find(cluster)
        await asyncio.sleep(SOON_S)
        async with cluster.node() as node, working(node):
            await asyncio.sleep(LONG_S)

    await cluster.assert_whole()
    assert await cluster.marked() == []
    assert await cluster.marked(PATHS.private) == []


@by_each
async def test_a_finding_lasts_as_long_as_the_mark_that_java_leaves(find: Find) -> None:
    """The ledger has damage of both kinds: one that Java sees and one that it does not."""
    cluster = await a_ledger()
    lose_an_end_and_a_middle(cluster)

    async with javas_worker(cluster):
        await find(cluster)
        await asyncio.sleep(SWEEP_S + SOON_S)
    async with checker(cluster) as made:
        await made.findings.sweep()

    assert await cluster.marked() == []
    assert await cluster.marked(PATHS.private) == [LEDGER]
    assert B2 in (await read_findings(cluster.store, PATHS, [LEDGER]))[LEDGER].bookies


@by_each
@pytest.mark.parametrize(
    ("lost", "shared", "own"),
    [
        pytest.param(0, [LEDGER], [], id="the first entry"),
        pytest.param(9, [LEDGER], [], id="the last entry"),
        pytest.param(4, [], [LEDGER], id="an entry between the ends"),
    ],
)
async def test_a_mark_is_in_the_queue_of_a_worker_that_can_repair_it(
    lost: int, shared: list[int], own: list[int], find: Find
) -> None:
    cluster = await a_ledger()
    cluster.bookie(B2).lose(LEDGER, lost)

    await find(cluster)

    assert (await cluster.marked(), await cluster.marked(PATHS.private)) == (shared, own)
