"""With active clients, transfers ask less of bookies that become slow or report an overload."""

import asyncio

import pytest

from ledgers.bulk.flow_control import START_SHARE
from ledgers.errors import BusyError
from tests.fake_bookie import ETOOMANYREQUESTS
from tests.ledgers.bulk_cases import LEDGER_ID, READS_IN_FLIGHT_MAX, Scene, in_scene

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
