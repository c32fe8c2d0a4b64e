"""Verdicts and errors reach their reader."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from auditor.fsck import executor as executor_module
from auditor.fsck.budget import Pace, ReadShare, fixed_pace
from auditor.fsck.executor import ProcessLimits, inspect, recheck
from auditor.fsck.options import FsckOptions
from auditor.fsck.verdicts import Grade, LedgerVerdict
from ledgers.bookies import Transfer
from ledgers.errors import SessionLostError, UnavailableError
from tests.fsck.inspections import ALL, executor, options
from tests.ledgers.bulk_cases import Scene, in_scene
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1

COUNT = 40


class Opened:
    """A fake of sessions: executors on a cluster in memory, counted."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.open_count = 0

    @asynccontextmanager
    async def __call__(self, wanted: FsckOptions, pace: Pace) -> AsyncIterator[object]:
        self.open_count += 1
        try:
            yield await executor(self.cluster, wanted)
        finally:
            self.open_count -= 1


async def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    cluster = await Cluster.start()
    for ledger_id in range(COUNT):
        await cluster.write_ledger(ALL, ledger_id=ledger_id, write_quorum=3)
    made = Opened(cluster)
    monkeypatch.setattr(executor_module, "open_executor", made)
    return made


async def verdicts_of(check: Callable[..., Awaitable[None]], asked: object) -> list[LedgerVerdict]:
    found: list[LedgerVerdict] = []

    async def add(verdict: LedgerVerdict) -> None:
        found.append(verdict)

    await check(options(), asked, add)
    return found


@in_virtual_time
async def test_every_ledger_has_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    made = await opened(monkeypatch)
    made.cluster.bookie(B1).wipe()

    first = await verdicts_of(inspect, [*range(COUNT), 77, 78])
    for ledger_id in range(10):
        await made.cluster.manager.delete(ledger_id, version=0)
    last = await verdicts_of(recheck, first)

    assert sorted(each.ledger_id for each in first) == list(range(COUNT))
    assert sorted(each.ledger_id for each in last) == list(range(10, COUNT))
    assert {each.grade for each in last} == {Grade.DEGRADED}
    assert made.open_count == 0


@in_virtual_time
async def test_an_error_comes_after_the_verdicts_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = await opened(monkeypatch)
    transfer_count = 0

    async def fail(transfer: Transfer) -> None:
        nonlocal transfer_count
        transfer_count += 1
        if transfer_count > 10:
            raise SessionLostError("the ZooKeeper session is over")

    made.cluster.bookies.before_transfer = fail
    found: list[LedgerVerdict] = []

    async def add(verdict: LedgerVerdict) -> None:
        found.append(verdict)

    with pytest.raises(SessionLostError):
        await inspect(options(ledgers_at_once=1), range(COUNT), add)

    assert len(found) == 10
    assert made.open_count == 0


@in_virtual_time
async def test_an_executor_that_cannot_be_opened_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @asynccontextmanager
    async def failing(wanted: FsckOptions, pace: Pace) -> AsyncIterator[object]:
        raise UnavailableError("no server answers")
        yield

    monkeypatch.setattr(executor_module, "open_executor", failing)
    with pytest.raises(UnavailableError):
        await verdicts_of(inspect, range(COUNT))


# --- The share of the budget ----------------------------------------------------------------------


@in_scene(limits_check_rate=True)
async def test_without_a_read_share_nothing_is_read(scene: Scene) -> None:
    """With a share, the process reads within its limits."""
    scene.fill(range(100))
    allowance = ProcessLimits(scene.budgets, scene.bulk)

    allowance.apply(None)
    reading = asyncio.create_task(scene.run(scene.halves(100, target=None)))
    await scene.settle()
    read_without = len(scene.a.reads_seen)
    was_given = allowance.is_set.is_set()
    allowance.apply(ReadShare(reads_in_flight_per_bookie=7))
    await reading

    assert (read_without, was_given) == (0, False)
    assert allowance.is_set.is_set()
    assert scene.budgets.reads_in_flight_max == 7
    assert scene.a.reads_in_flight_peak <= 7


@in_virtual_time
async def test_a_fixed_pace_is_what_the_options_allow() -> None:
    shares: list[ReadShare | None] = []
    wanted = options(reads_per_s=5, bytes_per_s=6, reads_in_flight_per_bookie=400)

    running = asyncio.create_task(fixed_pace(wanted, None, "", shares.append))  # type: ignore[arg-type]
    await asyncio.sleep(60)
    running.cancel()

    assert shares == [ReadShare(reads_per_s=5, bytes_per_s=6, reads_in_flight_per_bookie=400)]
