"""The bulk path where a copy's transfer reads more than it writes (``Transfer.checks``)."""

import asyncio

import pytest

from ledgers.bookies import Answer
from ledgers.errors import UnavailableError
from tests.ledgers.bulk_cases import DIGEST, LEDGER_ID, SHORT_TIMEOUT_S, Scene, in_scene

both_ways = pytest.mark.parametrize("reads_batches", [False, True], ids=["singles", "batches"])


@both_ways
@pytest.mark.parametrize("asked", [[0, 9], range(10)], ids=["ends", "all"])
@in_scene("reads_batches")
async def test_entries_to_check_are_verified_and_not_written(
    scene: Scene, reads_batches: bool, asked: list[int]
) -> None:
    scene.a.put(DIGEST, LEDGER_ID, range(10), b"from a")
    scene.b.put(DIGEST, LEDGER_ID, range(10), b"from b")

    result = await scene.run(
        scene.halves(0, reads={scene.a.bookie_id: range(10)}, checks={scene.b.bookie_id: asked})
    )

    assert (result.entry_count, result.failures) == (10, {})
    written = [entry for _, _, entry in scene.target.adds]
    assert sorted(written) == sorted(scene.a.entries.values())
    assert list(asked) == sorted(
        {entry_id for _, entry_id in scene.b.reads_seen}.union(
            *(entry_ids for _, entry_ids, _ in scene.b.batches_seen)
        )
    )


@both_ways
@in_scene("reads_batches")
async def test_a_failed_check_is_reported_and_stops_no_write(
    scene: Scene, reads_batches: bool
) -> None:
    scene.fill(range(10))
    del scene.b.entries[LEDGER_ID, 0]
    scene.b.entries[LEDGER_ID, 9] = scene.b.entries[LEDGER_ID, 9][:-1] + b"?"

    result = await scene.run(
        scene.halves(0, reads={scene.a.bookie_id: range(10)}, checks={scene.b.bookie_id: [0, 5, 9]})
    )

    assert result.failures == {scene.b.bookie_id: {0: Answer.ABSENT, 9: Answer.MISMATCH}}
    assert result.entry_count == 10


@in_scene(timeout_s=SHORT_TIMEOUT_S)
async def test_an_unanswered_check_times_out_and_the_writes_are_made(scene: Scene) -> None:
    scene.fill(range(10))
    scene.b.may_answer.clear()
    transfer = scene.halves(
        0, reads={scene.a.bookie_id: range(10)}, checks={scene.b.bookie_id: [0, 9]}
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(scene.run(transfer))
        await scene.until(lambda: len(scene.target.adds) == 10)
        await scene.wait_checks(SHORT_TIMEOUT_S + 2.0)

    result = running.result()
    assert result.entry_count == 10
    assert result.failures == {scene.b.bookie_id: dict.fromkeys((0, 9), Answer.UNKNOWN)}


@in_scene()
async def test_a_broken_target_makes_unchecked_entries_unknown(scene: Scene) -> None:
    scene.fill(range(10))
    scene.b.may_answer.clear()
    scene.target.answers_before_reset = 1

    result = await scene.run(
        scene.halves(0, reads={scene.a.bookie_id: range(10)}, checks={scene.b.bookie_id: [0, 9]})
    )

    assert isinstance(result.target_error, UnavailableError)
    assert result.failures == {scene.b.bookie_id: dict.fromkeys((0, 9), Answer.UNKNOWN)}
    scene.b.may_answer.set()
    await scene.until(scene.is_at_rest)
