"""The bulk path with bookies that break connections, do not answer, or cannot be reached."""

import asyncio

import pytest

from ledgers.bookies import Answer
from ledgers.bulk.connection import IDLE_MAX_S
from ledgers.codec.registration import Address, spelled_address
from ledgers.errors import UnavailableError
from ledgers.model import BookieId
from tests.fake_bookie import ADD, READ
from tests.ledgers.bulk_cases import LEDGER_ID, SHORT_TIMEOUT_S, Scene, in_scene, play


@pytest.mark.parametrize("answer_count", [0, 1, 17, 60])
@in_scene()
async def test_a_broken_source_fails_its_open_reads_at_once(
    scene: Scene, answer_count: int
) -> None:
    scene.fill(range(1_000))
    scene.a.answers_before_reset = answer_count

    result = await scene.run(scene.halves(1_000))

    failed = result.failures[scene.a.bookie_id]
    assert set(failed.values()) == {Answer.UNKNOWN}
    assert len(failed) >= 500 - answer_count
    assert result.entry_count == 1_000 - len(failed)
    assert scene.is_at_rest()


@pytest.mark.parametrize("answer_count", [0, 1, 60])
@in_scene()
async def test_a_broken_target_leaves_the_rest_unwritten_at_once(
    scene: Scene, answer_count: int
) -> None:
    scene.fill(range(1_000))
    scene.target.answers_before_reset = answer_count

    result = await scene.run(scene.halves(1_000))

    assert isinstance(result.target_error, UnavailableError)
    assert not result.failures
    assert len(result.unwritten) >= 1_000 - answer_count
    await scene.until(scene.is_at_rest)


def test_a_bookie_with_an_impossible_host_name_is_unknown() -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(10))
        misnamed.add(scene.a.bookie_id)

        result = await scene.run(scene.halves(10))

        assert result.failures == {
            scene.a.bookie_id: dict.fromkeys(range(0, 10, 2), Answer.UNKNOWN)
        }
        misnamed.clear()
        scene.bulk.bookie_returned(scene.a.bookie_id)
        assert (await scene.run(scene.halves(10))).entry_count == 10

    misnamed: set[BookieId] = set()

    def resolve(bookie: BookieId) -> Address:
        return Address("a..b", 3181) if bookie in misnamed else spelled_address(bookie)

    play(act, resolve=resolve)


@in_scene()
async def test_a_bookie_that_cannot_be_reached_is_unknown(scene: Scene) -> None:
    scene.fill(range(10))
    await scene.a.stop()

    result = await scene.run(scene.halves(10))
    again = await scene.run(scene.halves(10))  # now backing off

    for each in (result, again):
        assert each.failures == {scene.a.bookie_id: dict.fromkeys(range(0, 10, 2), Answer.UNKNOWN)}
        assert each.entry_count == 5
    await scene.a.start()


@in_scene()
async def test_an_unreachable_target_is_reported_without_any_read(scene: Scene) -> None:
    scene.fill(range(10))
    await scene.target.stop()

    result = await scene.run(scene.halves(10))
    again = await scene.run(scene.halves(10))

    for each in (result, again):
        assert isinstance(each.target_error, UnavailableError)
        assert each.unwritten == frozenset(range(10))
    assert not scene.a.reads_seen
    assert isinstance(result.target_error, UnavailableError)
    assert isinstance(result.target_error.__cause__, OSError)
    await scene.target.start()


@pytest.mark.parametrize("bookie_id", ["somebody", "host:", ":3181", "host:port"])
@in_scene()
async def test_a_bookie_without_an_address_is_unknown(scene: Scene, bookie_id: str) -> None:
    reads = {BookieId(bookie_id): range(3)}

    result = await scene.bulk.transfer(scene.halves(0, reads=reads, target=None))

    assert result.failures == {BookieId(bookie_id): dict.fromkeys(range(3), Answer.UNKNOWN)}


@pytest.mark.compat("G22", verdict="better")
@pytest.mark.parametrize("reads_batches", [False, True], ids=["singles", "batches"])
@in_scene("reads_batches", timeout_s=SHORT_TIMEOUT_S)
async def test_an_unresponsive_source_times_out_and_is_disconnected(
    scene: Scene, reads_batches: bool
) -> None:
    scene.fill(range(200))
    scene.a.may_answer.clear()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(scene.run(scene.runs(200)))
        await scene.until(lambda: len(scene.target.adds) == 100)
        await scene.wait_checks(SHORT_TIMEOUT_S + 2.0)

    result = running.result()
    assert result.failures == {scene.a.bookie_id: dict.fromkeys(range(100), Answer.UNKNOWN)}
    assert result.entry_count == 100
    assert scene.is_at_rest()
    await scene.until(lambda: scene.a.reads_in_flight == 0)


@in_scene(timeout_s=SHORT_TIMEOUT_S)
async def test_an_unresponsive_target_times_out_and_is_disconnected(scene: Scene) -> None:
    scene.fill(range(200))
    scene.target.may_answer.clear()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(scene.run(scene.halves(200)))
        await scene.until(lambda: scene.target.requests_waiting == 200)
        await scene.wait_checks(SHORT_TIMEOUT_S + 2.0)

    result = running.result()
    assert isinstance(result.target_error, UnavailableError)
    assert result.unwritten == frozenset(range(200))
    assert scene.is_at_rest()


@pytest.mark.parametrize("operation", [READ, ADD])
@in_scene(timeout_s=SHORT_TIMEOUT_S)
async def test_an_entry_without_a_reply_fails_only_its_transfer(
    scene: Scene, operation: int
) -> None:
    """The bookie answers others all the while, so that the connection is good."""
    scene.fill(range(50))
    scene.fill(range(10), ledger_id=8)
    unresponsive = scene.a if operation == READ else scene.target
    unresponsive.never_answers.add((LEDGER_ID, 20))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(scene.run(scene.halves(50)))
        while not running.done() or not scene.is_at_rest():  # its credit returns
            await scene.run(scene.halves(10, ledger_id=8))
            scene.skip(0.3)

    result = running.result()
    if operation == READ:
        assert result.failures == {scene.a.bookie_id: {20: Answer.UNKNOWN}}
    else:
        assert result.unwritten == {20}
        assert isinstance(result.target_error, UnavailableError)
    assert unresponsive.connection_count == 1


@pytest.mark.parametrize("operation", [READ, ADD])
@in_scene(timeout_s=SHORT_TIMEOUT_S)
async def test_a_stalled_transfer_does_not_fail_a_newer_one(scene: Scene, operation: int) -> None:
    """Nothing arrives at all, but the second has waited for a moment only."""
    for ledger_id in (LEDGER_ID, 8):
        scene.fill(range(10), ledger_id=ledger_id)
    slow = scene.a if operation == READ else scene.target
    slow.may_answer.clear()
    async with asyncio.TaskGroup() as group:
        stalled = group.create_task(scene.run(scene.halves(10)))
        await scene.until(lambda: slow.requests_waiting >= 5)
        await scene.wait_checks(SHORT_TIMEOUT_S - 1.0)
        waiting_count = slow.requests_waiting
        fresh = group.create_task(scene.run(scene.halves(10, ledger_id=8)))
        await scene.until(lambda: slow.requests_waiting == 2 * waiting_count)
        await scene.wait_checks(3.0)

        assert stalled.done()
        assert not fresh.done()
        slow.may_answer.set()

    assert fresh.result().entry_count == 10
    assert slow.connection_count == 1


@in_scene(timeout_s=SHORT_TIMEOUT_S)
async def test_a_slow_entry_that_makes_progress_is_waited_for(scene: Scene) -> None:
    scene.fill(range(10))
    async with asyncio.TaskGroup() as group:
        scene.a.may_answer.clear()
        transfer = scene.halves(0, reads={scene.a.bookie_id: range(10)})
        running = group.create_task(scene.run(transfer))
        await scene.until(lambda: scene.a.reads_in_flight == 10)
        for count in range(10):
            await scene.wait_checks(SHORT_TIMEOUT_S - 1.0)
            scene.a.answer_one()
            await scene.until_read(count + 1)

    assert running.result().entry_count == 10


@in_scene()
async def test_a_bookie_that_returned_is_asked_again(scene: Scene) -> None:
    scene.fill(range(10))
    await scene.run(scene.halves(10))
    scene.a.reset()
    scene.target.reset()
    await scene.settle()

    result = await scene.run(scene.halves(10))

    assert result.entry_count == 10
    assert scene.a.connection_count == scene.target.connection_count == 2


@in_scene(writes_bytes_max=1000000)
async def test_a_target_that_broke_while_blocked_is_written_to_again(scene: Scene) -> None:
    scene.fill(range(40), payload=bytes(500_000))
    scene.target.is_reading.clear()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(scene.run(scene.halves(40)))
        await scene.until_read(4)
        await scene.settle()
        scene.target.reset()
    assert isinstance(first.result().target_error, UnavailableError)
    scene.target.is_reading.set()

    scene.skip(1.0)
    again = await scene.run(scene.halves(40))

    assert again.entry_count == 40
    await scene.until(scene.is_at_rest)


def test_a_bookie_that_disappeared_gets_few_connections() -> None:
    attempts: list[BookieId] = []

    async def act(scene: Scene) -> None:
        scene.fill(range(10))
        await scene.run(scene.halves(10))
        await scene.a.stop()
        attempts.clear()

        for _ in range(50):
            await scene.run(scene.halves(10))

        assert attempts.count(scene.a.bookie_id) < 10
        await scene.a.start()

    def resolve(bookie: BookieId) -> Address:
        attempts.append(bookie)
        return spelled_address(bookie)

    play(act, resolve=resolve)


@in_scene(timeout_s=SHORT_TIMEOUT_S)
async def test_missing_replies_are_noticed_after_a_time_unconnected(scene: Scene) -> None:
    scene.fill(range(10))
    await scene.run(scene.halves(10))
    await scene.wait_checks(IDLE_MAX_S + 10.0)
    await scene.until(lambda: not any(bookie.is_connected for bookie in scene.bookies))

    scene.a.may_answer.clear()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(scene.run(scene.halves(10)))
        await scene.until(lambda: len(scene.target.adds) == 15)
        await scene.wait_checks(SHORT_TIMEOUT_S + 2.0)

    assert set(running.result().failures) == {scene.a.bookie_id}


@in_scene()
async def test_a_bookie_that_accepts_and_drops_gets_few_connections(scene: Scene) -> None:
    """A bookie does this while it replays its journal."""
    scene.fill(range(10))
    scene.a.answers_before_reset = 0

    for _ in range(50):
        await scene.run(scene.halves(10))
    assert scene.a.connection_count < 10

    scene.a.answers_before_reset = None
    scene.skip(20.0)
    assert (await scene.run(scene.halves(10))).entry_count == 10
