"""The rate limits of copying and the memory of the process: which entries are admitted, in which
order."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from ledgers.bulk.flow_control import BURST_S as FLOW_BURST_S
from ledgers.bulk.flow_control import (
    SHARED_ADDS_PER_S,
    SHARED_BYTES_PER_S,
    STARTING_ENTRIES,
    Activity,
    BookieFlow,
    FlowControl,
    flow_limits,
)
from ledgers.bulk.limiters import BURST_S, Limiter, LimiterChain, RateLimiter
from tests.ledgers.bulk_cases import Scene, in_scene
from tests.replication.cluster import in_virtual_time

MINUTE_S = 60.0


@dataclass(slots=True, eq=False)
class Copying:
    """A part of a transfer that always requests more entries of one size. It is its own transfer
    state."""

    pace: RateLimiter
    second_pace: RateLimiter | None = None
    expected_bytes: int = 100
    quantum: int = 16
    woken_by: set[Limiter] = field(default_factory=set)
    has_started: bool = False
    is_small: bool = False
    """It wants no more than the first it gets."""
    passages: list[tuple[float, int]] = field(default_factory=list)
    """The entries that were let through, with the time."""

    @property
    def state(self) -> "Copying":
        return self

    @property
    def limiters(self) -> tuple[RateLimiter, ...]:
        return (self.pace,) if self.second_pace is None else (self.pace, self.second_pace)

    @property
    def entry_count(self) -> int:
        return sum(count for _, count in self.passages)

    def enqueue(self) -> None:
        asyncio.get_running_loop().call_soon(self.go_on)

    def go_on(self) -> None:
        chain = LimiterChain(*self.limiters)
        while self.quantum and (count := chain.admit(self, self.quantum)):
            self.passages.append((asyncio.get_running_loop().time(), count))
            if self.is_small:
                self.quantum = 0


async def copied_in_a_minute(*copyings: Copying) -> None:
    for copying in copyings:
        copying.go_on()
    await asyncio.sleep(MINUTE_S)
    for copying in copyings:
        for limiter in copying.limiters:
            limiter.close()


@pytest.mark.compat(
    "TestReplicationWorker.testMultipleLedgerReplicationWithReplicationWorkerBatchRead",
    verdict="better",
)
@pytest.mark.parametrize(
    ("limits", "entry_bytes", "entries_per_s"),
    [
        pytest.param({"entries_per_s": 100, "bytes_per_s": 0}, 1, 100, id="entries"),
        pytest.param({"entries_per_s": 0, "bytes_per_s": 50_000}, 100, 500, id="bytes"),
        pytest.param({"entries_per_s": 9, "bytes_per_s": 50_000}, 100, 9, id="the scarcer limit"),
        pytest.param({"entries_per_s": 1, "bytes_per_s": 0}, 100, 1, id="one entry a second"),
        pytest.param(
            {"entries_per_s": 0, "bytes_per_s": 1_000}, 5_000, 0.2, id="entries beyond a burst"
        ),
    ],
)
@in_virtual_time
async def test_copying_obeys_its_rate_limit(
    limits: dict[str, int], entry_bytes: int, entries_per_s: float
) -> None:
    pace = RateLimiter()
    pace.set(**limits)
    copying = Copying(pace, expected_bytes=entry_bytes)

    await copied_in_a_minute(copying)

    burst = max(2.0, entries_per_s * BURST_S)
    assert copying.entry_count == pytest.approx(entries_per_s * MINUTE_S, abs=burst, rel=0.02)


@in_virtual_time
async def test_unused_rate_is_saved_for_a_fraction_of_a_second_only() -> None:
    pace = RateLimiter()
    pace.set(entries_per_s=1_000, bytes_per_s=0)
    copying = Copying(pace)
    await asyncio.sleep(MINUTE_S)

    copying.go_on()

    assert copying.entry_count <= 1_000 * BURST_S
    pace.close()


@in_virtual_time
async def test_the_rate_counts_the_real_size_of_entries() -> None:
    pace = RateLimiter()
    pace.set(entries_per_s=0, bytes_per_s=10_000)
    copying = Copying(pace, quantum=1)
    copying.go_on()
    before = copying.entry_count

    pace.resize(100_000)  # ten seconds' worth more than was taken
    await asyncio.sleep(9.0)

    assert copying.entry_count <= before + 1
    await asyncio.sleep(5.0)
    assert copying.entry_count > before + 10
    pace.close()


@in_virtual_time
async def test_missing_entries_do_not_count() -> None:
    pace = RateLimiter()
    pace.set(entries_per_s=10, bytes_per_s=0)
    copying = Copying(pace, quantum=1)
    copying.go_on()
    for _ in range(100):
        pace.refund(100, count=1)

    await asyncio.sleep(0.2)

    assert copying.entry_count > 100
    pace.close()


@in_virtual_time
async def test_a_rate_may_be_changed_and_removed_while_copies_wait() -> None:
    pace = RateLimiter()
    pace.set(entries_per_s=1, bytes_per_s=0)
    copying = Copying(pace)
    copying.go_on()
    await asyncio.sleep(10.0)
    slow_count = copying.entry_count

    pace.set(entries_per_s=1_000, bytes_per_s=0)
    await asyncio.sleep(10.0)

    assert slow_count <= 12
    assert copying.entry_count > 9_000
    copying.quantum = 0  # it has all it wanted
    pace.set(entries_per_s=0, bytes_per_s=0)
    await asyncio.sleep(0.1)
    assert pace.admit(Copying(pace), 1_000_000) == 1_000_000


@in_virtual_time
async def test_all_copies_make_progress_at_a_low_rate() -> None:
    pace = RateLimiter()
    pace.set(entries_per_s=100, bytes_per_s=0)
    copyings = [Copying(pace) for _ in range(7)]

    await copied_in_a_minute(*copyings)

    counts = [copying.entry_count for copying in copyings]
    assert max(counts) < 1.1 * min(counts)


def pace_of_adds() -> RateLimiter:
    """Return the limiter of adds to a bookie with active clients."""
    return BookieFlow(flow_limits(Activity.ACTIVE, yields=True, sharer_count=1)).adds


@in_virtual_time
async def test_with_active_clients_entries_are_added_in_small_bursts() -> None:
    copying = Copying(pace_of_adds(), quantum=60)

    await copied_in_a_minute(copying)

    assert copying.entry_count == pytest.approx(SHARED_ADDS_PER_S * MINUTE_S, rel=0.02)
    burst: dict[float, int] = {}
    for at_s, count in copying.passages:
        burst[at_s] = burst.get(at_s, 0) + count
    assert max(burst.values()) <= SHARED_ADDS_PER_S * FLOW_BURST_S


@in_virtual_time
async def test_with_active_clients_small_transfers_count_for_more() -> None:
    """For what they cost besides their entries."""
    pace = pace_of_adds()
    transfers = [Copying(pace, quantum=10, is_small=True) for _ in range(3_000)]

    began_s = asyncio.get_running_loop().time()
    await copied_in_a_minute(*transfers)

    took_s = max(at_s for transfer in transfers for at_s, _ in transfer.passages) - began_s
    assert took_s == pytest.approx(3_000 * (10 + STARTING_ENTRIES) / SHARED_ADDS_PER_S, rel=0.1)


# --- In transfers ---------------------------------------------------------------------------------


@in_scene()
async def test_a_check_does_not_obey_the_rate_of_copying(scene: Scene) -> None:
    scene.fill(range(500))
    scene.bulk.rate_limit.set(entries_per_s=1, bytes_per_s=0)
    copying = asyncio.create_task(scene.run(scene.halves(500)))

    result = await scene.run(scene.halves(500, target=None))

    assert result.entry_count == 500
    assert not copying.done()
    scene.bulk.rate_limit.set(entries_per_s=0, bytes_per_s=0)
    assert (await copying).entry_count == 500


@pytest.mark.parametrize("reads_batches", [False, True], ids=["singles", "batches"])
@in_scene("reads_batches", limits_check_rate=True, timeout_s=1.0)
async def test_a_check_that_waits_for_a_limited_read_does_not_time_out(
    scene: Scene, reads_batches: bool
) -> None:
    scene.fill(range(500))
    scene.bulk.rate_limit.set(entries_per_s=100, bytes_per_s=0)
    reading = asyncio.create_task(scene.run(scene.halves(500, target=None)))

    await scene.wait_checks(3.0)

    assert 0 < scene.bulk.totals.entries_read <= 300
    assert not reading.done()
    scene.bulk.rate_limit.set(entries_per_s=0, bytes_per_s=0)
    assert (await reading).entry_count == 500


@pytest.mark.parametrize("reads_batches", [False, True], ids=["singles", "batches"])
@in_scene("reads_batches", memory_entries_max=40, other_count=4)
async def test_bytes_in_flight_are_bounded_for_any_number_of_targets(
    scene: Scene, reads_batches: bool
) -> None:
    targets = [scene.target, *scene.others]
    for number, target in enumerate(targets):
        scene.fill(range(200), ledger_id=number)
        target.may_answer.clear()
    async with asyncio.TaskGroup() as group:
        for number, target in enumerate(targets):
            transfer = scene.runs(200, ledger_id=number, target=target.bookie_id)
            group.create_task(scene.run(transfer))
        await scene.until(lambda: sum(t.requests_waiting for t in targets) == 40)
        await scene.settle()

        assert scene.bulk.totals.entries_read == 40
        for target in targets:
            target.may_answer.set()


@in_scene(memory_bytes_max=550000, other_count=4)
async def test_bytes_in_flight_are_bounded_with_entries_of_any_size(scene: Scene) -> None:
    targets = [scene.target, *scene.others]
    for number, target in enumerate(targets):
        scene.fill(range(20), ledger_id=number, payload=bytes(100_000))
        target.may_answer.clear()
    async with asyncio.TaskGroup() as group:
        for number, target in enumerate(targets):
            transfer = scene.halves(
                20, ledger_id=number, target=target.bookie_id, entry_bytes_hint=100_040
            )
            group.create_task(scene.run(transfer))
        await scene.until(lambda: sum(t.requests_waiting for t in targets) == 5)
        await scene.settle()

        assert scene.bulk.totals.read_bytes < 600_000
        for target in targets:
            target.may_answer.set()


@in_scene(memory_entries_max=8)
async def test_checks_and_copies_both_progress_while_memory_is_short(scene: Scene) -> None:
    for ledger_id in range(20):
        scene.fill(range(50), ledger_id=ledger_id)

    results = await asyncio.gather(
        *(
            scene.run(scene.halves(50, ledger_id=n, **({"target": None} if n % 2 else {})))
            for n in range(20)
        )
    )

    assert [result.entry_count for result in results] == [50] * 20


@pytest.mark.parametrize(
    ("in_runs", "of_target", "pace_name"),
    [
        pytest.param(True, True, "adds", id="adds"),
        pytest.param(True, False, "reads", id="reads"),
        pytest.param(False, False, "single_reads", id="single reads"),
    ],
)
@in_scene(reads_batches=True)
async def test_copies_obey_the_limits_of_each_bookie(
    scene: Scene, in_runs: bool, of_target: bool, pace_name: str
) -> None:
    count = 100

    scene.fill(range(count))
    bookie = scene.target if of_target else scene.a
    pace: RateLimiter = getattr(scene.bulk.flow.of(bookie.bookie_id), pace_name)
    pace.set(entries_per_s=1, bytes_per_s=0)
    pace.admit(Copying(RateLimiter()), 1)  # the first passes always
    shape = scene.runs if in_runs else scene.halves
    copying = asyncio.create_task(scene.run(shape(count)))
    await scene.run(shape(count, reads={scene.b.bookie_id: range(count)}, target=None))
    await scene.settle()  # as long as the copy would take

    assert not copying.done()
    pace.set(entries_per_s=0, bytes_per_s=0)
    assert (await copying).entry_count == count


@in_scene(yields=True)
async def test_copies_of_large_entries_obey_a_limit_in_bytes(scene: Scene) -> None:
    """With active clients."""
    count, entry_bytes = 300, 100_000

    scene.fill(range(count), payload=bytes(entry_bytes))
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    await scene.run(scene.halves(count, entry_bytes_hint=entry_bytes))

    least_s = count * entry_bytes / SHARED_BYTES_PER_S - FLOW_BURST_S
    assert loop.time() - began_s >= 0.9 * least_s


def clients_lose_priority(flow: FlowControl) -> None:
    flow.yields = False


def clients_stop(flow: FlowControl) -> None:
    flow.set_activity(lambda bookie: Activity.QUIET, sharer_count=1)


@pytest.mark.parametrize("change", [clients_lose_priority, clients_stop])
@in_scene(yields=True)
async def test_waiting_copies_continue_at_full_speed(
    scene: Scene, change: Callable[[FlowControl], None]
) -> None:
    scene.fill(range(500))
    adds = scene.bulk.flow.of(scene.target.bookie_id).adds
    adds.set(entries_per_s=1, bytes_per_s=0)
    copying = asyncio.create_task(scene.run(scene.halves(500)))
    await scene.run(scene.halves(500, target=None))  # as long as the copy would take
    assert not copying.done()

    change(scene.bulk.flow)

    assert (await copying).entry_count == 500
    assert adds.admit(Copying(RateLimiter()), 1_000_000) == 1_000_000
