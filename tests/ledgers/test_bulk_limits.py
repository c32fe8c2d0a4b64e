"""The bulk path's limits, and the order in which transfers progress (rule S10)."""

import asyncio

import pytest

from ledgers.bulk.flow_control import START_SHARE
from ledgers.bulk.limiters import ASKED_BYTES_MAX
from ledgers.bulk.transfer import QUANTUM_COUNT
from ledgers.errors import BusyError
from tests.fake_bookie import ETOOMANYREQUESTS
from tests.ledgers.bulk_cases import (
    LEDGER_ID,
    READS_IN_FLIGHT_MAX,
    SHORT_TIMEOUT_S,
    Scene,
    in_scene,
    play,
)


@pytest.mark.parametrize("cap", [1, 2, 64])
def test_reads_in_flight_are_bounded_over_all_transfers(cap: int) -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(300))
        scene.a.may_answer.clear()

        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(scene.run(scene.halves(300)))
            await scene.until(lambda: scene.a.reads_in_flight == cap)
            scene.a.may_answer.set()

        assert scene.a.reads_in_flight_peak == cap
        assert scene.b.reads_in_flight_peak <= cap
        assert scene.is_at_rest()

    play(act, reads_in_flight_max=cap)


@in_scene()
async def test_the_bound_may_be_lowered_while_transfers_run(scene: Scene) -> None:
    scene.fill(range(2_000))
    async with asyncio.TaskGroup() as group:
        group.create_task(scene.run(scene.halves(2_000)))
        await scene.until(lambda: len(scene.a.reads_seen) > 100)

        scene.budgets.reads_in_flight_max = 3

        seen_count = len(scene.a.reads_seen)
        await scene.until(lambda: len(scene.a.reads_seen) > seen_count + 200)
        scene.a.reads_in_flight_peak = 0
    assert 1 <= scene.a.reads_in_flight_peak <= 3


@in_scene(reads_in_flight_max=10)
async def test_the_budget_is_shared_with_single_requests(scene: Scene) -> None:
    scene.fill(range(500))
    budget = scene.budgets.reads(scene.a.bookie_id)
    assert budget.take(7, 100) == 7

    await scene.run(scene.halves(500))

    assert scene.a.reads_in_flight_peak == 3
    assert budget.count == 7
    budget.release(700, count=7)


@in_scene(reads_in_flight_max=4, timeout_s=SHORT_TIMEOUT_S)
async def test_a_transfer_waits_for_the_credit_of_single_requests(scene: Scene) -> None:
    scene.fill(range(20))
    budget = scene.budgets.reads(scene.a.bookie_id)
    budget.take(4, 100)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(scene.run(scene.halves(20)))
        await scene.until_read(10)
        await scene.wait_checks(60.0)
        assert not running.done()
        assert not scene.a.reads_seen

        budget.release(400, count=4)

    assert running.result().entry_count == 20


@in_scene(reads_in_flight_max=4)
async def test_single_requests_get_their_turn_while_a_transfer_runs(scene: Scene) -> None:
    scene.fill(range(2_000))
    budget = scene.budgets.reads(scene.a.bookie_id)
    async with asyncio.TaskGroup() as group:
        copying = group.create_task(scene.run(scene.halves(2_000)))
        await scene.until(lambda: budget.count == 4)
        for _ in range(20):
            await budget.acquire(1_000)
            budget.release(1_000)
        assert not copying.done()


@in_scene()
async def test_requested_bytes_stay_within_the_window(scene: Scene) -> None:
    """Once the size of an entry is known."""
    entry_bytes = 500_000
    scene.fill(range(60), payload=bytes(entry_bytes - 36))

    await scene.run(scene.halves(60, entry_bytes_hint=entry_bytes))

    assert scene.a.bytes_in_flight_peak <= ASKED_BYTES_MAX
    assert scene.a.reads_in_flight_peak > 1


@in_scene()
async def test_a_wrong_guess_of_the_size_costs_one_quantum_at_most(scene: Scene) -> None:
    scene.fill(range(100), payload=bytes(400_000))

    await scene.run(scene.halves(100, entry_bytes_hint=10))

    # The rest of the guessed quantum may be outstanding yet when the first entry has been
    # weighed.
    assert scene.a.reads_in_flight_peak < QUANTUM_COUNT + ASKED_BYTES_MAX // 400_000


@in_scene(writes_in_flight_max=40)
async def test_bytes_on_their_way_to_a_target_are_bounded(scene: Scene) -> None:
    scene.fill(range(500))
    scene.target.may_answer.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(scene.run(scene.halves(500)))
        await scene.until(lambda: scene.target.requests_waiting == 40)
        await scene.settle()

        assert len(scene.a.reads_seen) + len(scene.b.reads_seen) == 40
        scene.target.may_answer.set()
    assert scene.is_at_rest()


@in_scene(writes_in_flight_max=40, other_count=1)
async def test_a_full_target_does_not_delay_transfers_to_another(scene: Scene) -> None:
    scene.fill(range(500))
    scene.target.may_answer.clear()
    async with asyncio.TaskGroup() as group:
        stuck = group.create_task(scene.run(scene.halves(500)))
        await scene.until(lambda: scene.target.requests_waiting == 40)

        await scene.run(scene.halves(500, target=scene.others[0].bookie_id))

        assert not stuck.done()
        scene.target.may_answer.set()


@in_scene(writes_bytes_max=2000000)
async def test_unexpectedly_large_entries_wait_at_the_source(scene: Scene) -> None:
    """Not in memory."""
    scene.fill(range(64), payload=bytes(1_000_000))
    scene.target.is_reading.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(scene.run(scene.halves(64, entry_bytes_hint=10)))
        await scene.until(lambda: scene.bulk.totals.entries_read >= 4)
        await scene.settle()

        # Of 32 MB that were asked for: what sockets hold, and what the transport may.
        assert scene.bulk.totals.read_bytes < 20_000_000
        scene.target.is_reading.set()


@in_scene()
async def test_small_ledgers_are_not_starved_by_a_large_one(scene: Scene) -> None:
    scene.fill(range(5_000))
    small_ids = range(100, 110)
    for ledger_id in small_ids:
        scene.fill(range(10), ledger_id=ledger_id)
    async with asyncio.TaskGroup() as group:
        group.create_task(scene.run(scene.halves(5_000)))
        await scene.until(lambda: len(scene.a.reads_seen) > 100)
        before = len(scene.a.reads_seen)

        async with asyncio.TaskGroup() as small:
            for ledger_id in small_ids:
                small.create_task(scene.run(scene.halves(10, ledger_id=ledger_id)))

        assert len(scene.a.reads_seen) - before < 1_000


@pytest.mark.parametrize("writes_in_flight_max", [8, 500])
@in_scene("writes_in_flight_max")
async def test_a_large_ledger_is_not_starved_by_small_ones(
    scene: Scene, writes_in_flight_max: int
) -> None:
    """Neither at its sources nor at its target, whose window newcomers could fill."""
    scene.target.split_bytes_max = 28  # its window is given back bit by bit
    scene.fill(range(200))
    small_ids = range(100, 140)
    for ledger_id in small_ids:
        scene.fill(range(10), ledger_id=ledger_id)
    is_done = False

    async def repeat(ledger_id: int) -> None:
        while not is_done:
            await scene.run(scene.halves(2, ledger_id=ledger_id))

    async with asyncio.TaskGroup() as group:
        for ledger_id in small_ids:
            group.create_task(repeat(ledger_id))
        await scene.run(scene.halves(200))
        is_done = True

    assert len(scene.a.reads_seen) < 2_500


@in_scene()
async def test_large_entries_take_turns_one_by_one(scene: Scene) -> None:
    """A few large entries weigh as much as many small ones."""
    large, small = range(100, 104), range(200, 204)
    for ledger_id in large:
        scene.fill(range(60), ledger_id=ledger_id, payload=bytes(200_000))
    for ledger_id in small:
        scene.fill(range(60), ledger_id=ledger_id)
    reads = {scene.a.bookie_id: range(60)}

    async with asyncio.TaskGroup() as group:
        for ledger_id in (*large, *small):
            transfer = scene.halves(0, ledger_id=ledger_id, reads=reads, target=None)
            group.create_task(scene.run(transfer))

    last_small = max(n for n, (ledger_id, _) in enumerate(scene.a.reads_seen) if ledger_id in small)
    large_before = sum(ledger_id in large for ledger_id, _ in scene.a.reads_seen[:last_small])
    assert large_before < 180  # of 240


# --- Bookies that become slow or report an overload -----------------------------------------------


FIRST = READS_IN_FLIGHT_MAX // START_SHARE


async def asked_at_once(scene: Scene) -> int:
    """Return the number of reads sent to an unresponsive bookie by a transfer that knows its
    entries' size."""
    await scene.settle()
    return scene.a.reads_in_flight


@pytest.mark.parametrize(("yields", "least", "most"), [(True, 1, FIRST), (False, 64, 64)])
@in_scene("yields")
async def test_the_first_requests_are_a_part_of_the_bound(
    scene: Scene, yields: bool, least: int, most: int
) -> None:
    scene.fill(range(2_000))
    scene.a.may_answer.clear()
    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(scene.run(scene.halves(2_000, target=None)))
        await scene.until(lambda: scene.a.reads_in_flight >= min(least, FIRST))

        assert least <= await asked_at_once(scene) <= most
        scene.a.may_answer.set()


@pytest.mark.parametrize("reads_batches", [False, True], ids=["singles", "batches"])
@in_scene("reads_batches", yields=True)
async def test_the_replies_of_sources_and_targets_are_timed(
    scene: Scene, reads_batches: bool
) -> None:
    scene.fill(range(8_000))

    for _ in range(3):
        await scene.run(scene.runs(8_000, entry_bytes_hint=40))

    assert scene.bulk.source_health(scene.a.bookie_id).reply_s > 0
    assert scene.bulk._targets[scene.target.bookie_id]._reply_times.reply_s > 0


@in_scene(yields=True)
async def test_an_overloaded_source_is_asked_for_less(scene: Scene) -> None:
    scene.fill(range(600))
    scene.a.read_codes = {(LEDGER_ID, n): ETOOMANYREQUESTS for n in range(0, 40, 2)}
    reads = {scene.a.bookie_id: range(0, 40, 2)}
    await scene.run(scene.halves(0, reads=reads, target=None))
    scene.a.may_answer.clear()
    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(scene.run(scene.halves(600, target=None)))
        await scene.until(lambda: scene.a.reads_in_flight >= 1)

        assert await asked_at_once(scene) == 1
        scene.bulk.flow.yields = False
        assert await asked_at_once(scene) == 64
        scene.a.may_answer.set()


@in_scene(yields=True)
async def test_an_overloaded_target_is_given_less(scene: Scene) -> None:
    scene.fill(range(2_000))
    scene.target.add_codes[LEDGER_ID, 0] = ETOOMANYREQUESTS
    for _ in range(8):
        result = await scene.run(scene.halves(40))
        assert isinstance(result.target_error, BusyError)
    scene.target.add_codes.clear()
    scene.target.may_answer.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(scene.run(scene.halves(2_000)))
        await scene.until(lambda: scene.target.requests_waiting >= 1)
        await scene.settle()

        assert scene.target.requests_waiting <= 10
        scene.target.may_answer.set()
