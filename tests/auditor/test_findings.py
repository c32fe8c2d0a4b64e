"""What a check found, told until the mark is gone."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from auditor.mark_reasons import SWEEP_S, Finding, Findings, read_findings
from ledgers.clock import Clock
from ledgers.errors import UnavailableError
from ledgers.memory.store import Fault, MemoryStore
from ledgers.store import Delete, MetadataStore, Operation
from tests.auditor.auditing import leading
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import LEDGER, PATHS


class Ahead:
    """By an hour and a half."""

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
    """A leader's findings, swept now and then."""
    async with leading(cluster) as leader:
        findings = Findings(leader.store, leader.batcher, PATHS, cluster.clock)
        sweeping = asyncio.create_task(findings.run())
        yield findings
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)


@in_virtual_time
async def test_what_was_found_can_be_read_by_everybody() -> None:
    cluster = await Cluster.start()
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


@in_virtual_time
async def test_the_first_findings_of_a_cluster_may_come_together() -> None:
    cluster = await Cluster.start()
    async with finding(cluster) as findings:
        await asyncio.gather(*(findings.write(n, "fsck", {B1}, "missing") for n in range(9)))

    assert sorted(await read_findings(cluster.store, PATHS, range(9))) == list(range(9))


@in_virtual_time
async def test_a_directory_that_somebody_deleted_is_made_again() -> None:
    cluster = await Cluster.start()
    async with finding(cluster) as findings:
        await findings.write(6, "fsck", {B1}, "missing")
        for path in (PATHS.finding(6), PATHS.findings):
            await cluster.store.delete(path)

        await asyncio.gather(*(findings.write(n, "fsck", {B1}, "missing") for n in (7, 8)))

    assert sorted(await read_findings(cluster.store, PATHS, range(9))) == [7, 8]


@in_virtual_time
async def test_a_directory_that_goes_whenever_it_is_made_is_a_refusal_and_no_endless_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await Cluster.start()
    async with finding(cluster) as findings:

        async def vanish(store: MetadataStore, path: str) -> None:
            assert path == PATHS.findings

        monkeypatch.setattr("auditor.mark_reasons.ensure_znode", vanish)
        with pytest.raises(UnavailableError):
            await findings.write(7, "fsck", {B1}, "missing")


@in_virtual_time
async def test_a_later_finding_takes_the_place_of_an_earlier_one_and_keeps_its_bookies() -> None:
    cluster = await Cluster.start()
    async with finding(cluster) as findings:
        await findings.write(7, "all-ledgers", {B1}, "first")
        await findings.write(7, "placement", (), "second")

    found = await read_findings(cluster.store, PATHS, [7])
    assert (found[7].check, found[7].detail) == ("placement", "second")
    assert found[7].bookies == (B1,), "what the first one found is still to be mended"


@in_virtual_time
async def test_findings_of_two_at_once_name_the_bookies_of_both() -> None:
    cluster = await Cluster.start()
    async with finding(cluster) as findings:
        await asyncio.gather(
            findings.write(7, "fsck", {B1}, "entry 3 is corrupt"),
            findings.write(7, "all-ledgers", {B2}, "entry 5 is missing"),
        )

    found = await read_findings(cluster.store, PATHS, [7])
    assert found[7].bookies == (B1, B2)


@in_virtual_time
async def test_a_finding_that_cannot_be_read_is_written_over() -> None:
    cluster = await Cluster.start()
    async with finding(cluster) as findings:
        await findings.write(7, "fsck", {B1}, "entry 3 is corrupt")
        await cluster.store.set(PATHS.finding(7), b"?", version=-1)

        await findings.write(7, "fsck", {B2}, "entry 5 is missing")

    assert (await read_findings(cluster.store, PATHS, [7]))[7].bookies == (B2,)


@in_virtual_time
async def test_a_finding_stays_while_its_ledger_is_marked_and_goes_with_the_mark() -> None:
    cluster = await Cluster.start()
    async with finding(cluster) as findings:
        await findings.write(LEDGER, "all-ledgers", {B1}, "missing")
        await cluster.mark(B1)
        await asyncio.sleep(3 * SWEEP_S)
        assert LEDGER in await read_findings(cluster.store, PATHS, [LEDGER])

        await cluster.store.delete(PATHS.mark(LEDGER))
        await asyncio.sleep(2 * SWEEP_S)

    assert await cluster.store.exists(PATHS.finding(LEDGER)) is None


@in_virtual_time
async def test_a_finding_whose_mark_is_still_to_come_is_not_swept_away() -> None:
    cluster = await Cluster.start()
    async with finding(cluster) as findings:
        await asyncio.sleep(SWEEP_S - 1)
        await findings.write(7, "all-ledgers", {B1}, "missing")
        await asyncio.sleep(2)

    assert 7 in await read_findings(cluster.store, PATHS, [7])


@in_virtual_time
async def test_a_finding_that_is_written_anew_during_the_sweep_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await Cluster.start()
    async with finding(cluster) as findings:
        await asyncio.sleep(5)
        await findings.write(7, "all-ledgers", {B1}, "first")
        await asyncio.sleep(
            SWEEP_S + 1
        )  # sweeps of its own come before it is old enough, and later
        commit = findings._batcher.commit

        async def written_first(operations):  # type: ignore[no-untyped-def]
            monkeypatch.undo()
            await findings.write(7, "all-ledgers", {B1}, "second")
            return await commit(operations)

        monkeypatch.setattr(findings._batcher, "commit", written_first)
        await findings.sweep()

    assert (await read_findings(cluster.store, PATHS, [7]))[7].detail == "second"


@in_virtual_time
async def test_a_sweep_that_fails_is_made_up_for_by_the_next_one() -> None:
    cluster = await Cluster.start()
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


@in_virtual_time
async def test_many_findings_are_looked_at_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
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


@in_virtual_time
async def test_a_finding_that_acls_shut_away_ends_no_sweep() -> None:
    cluster = await Cluster.start()
    async with leading(cluster) as leader:
        findings = Findings(leader.store, leader.batcher, PATHS, cluster.clock)
        for ledger_id in (7, 8):
            await findings.write(ledger_id, "all-ledgers", {B1}, "missing")
        shut_out(leader.store, PATHS.finding(7))

        for _ in range(2):
            assert await findings.sweep() == 2

    assert [*await read_findings(cluster.store, PATHS, [7, 8])] == [7]


@in_virtual_time
async def test_where_acls_shut_all_of_them_away_the_leader_goes_on() -> None:
    cluster = await Cluster.start()
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


@in_virtual_time
async def test_no_clock_that_is_ahead_of_zookeepers_makes_a_finding_old() -> None:
    cluster = await Cluster.start()
    async with leading(cluster) as leader:
        findings = Findings(leader.store, leader.batcher, PATHS, Ahead(cluster.clock))
        await findings.write(7, "all-ledgers", {B1}, "missing")

        await findings.sweep()

    assert 7 in await read_findings(cluster.store, PATHS, [7])


@pytest.mark.parametrize("data", [b"", b"[]", b'{"version": 1, "check": 5}'])
@in_virtual_time
async def test_a_finding_that_nobody_can_read_says_nothing(data: bytes) -> None:
    cluster = await Cluster.start()
    await cluster.store.create(PATHS.finding(7), data, with_parents=True)

    assert await read_findings(cluster.store, PATHS, [7]) == {}


@in_virtual_time
async def test_a_finding_that_was_swept_away_meanwhile_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await Cluster.start()
    async with finding(cluster) as findings:
        await findings.write(7, "all-ledgers", {B1}, "first")
        commit = findings._batcher.commit

        async def swept_first(operations):  # type: ignore[no-untyped-def]
            try:
                return await commit(operations)
            finally:
                gone = [Delete(path=PATHS.finding(7))]
                if await cluster.store.exists(PATHS.finding(7)):
                    cluster.tree.apply(cluster.store.session_id, gone)

        monkeypatch.setattr(findings._batcher, "commit", swept_first)
        await findings.write(7, "all-ledgers", {B1}, "second")


@in_virtual_time
async def test_a_finding_that_acls_shut_away_hides_no_other() -> None:
    cluster = await Cluster.start()
    async with finding(cluster) as findings:
        await findings.write(7, "all-ledgers", {B1}, "first")
        await findings.write(8, "all-ledgers", {B2}, "second")
        shut_out(cluster.store, PATHS.finding(7))

        assert [*await read_findings(cluster.store, PATHS, [7, 8])] == [8]
