"""Each reply reaches its transfer when several transfers of one ledger share a connection."""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import pytest

from ledgers.bulk.transfer import has_first_claim
from tests.ledgers.bulk_cases import Scene, in_scene


@dataclass(slots=True, eq=False)
class Slice:
    first_id: int
    last_id: int


@pytest.mark.parametrize(
    ("before", "own", "is_first"),
    [
        pytest.param([], (0, 9), True, id="alone"),
        pytest.param([(0, 9)], (10, 19), True, id="behind a slice that ends before"),
        pytest.param([(10, 19)], (0, 9), True, id="behind a slice that begins after"),
        pytest.param([(0, 9)], (9, 19), False, id="behind a part with the same entry"),
        pytest.param([(5, 6)], (0, 9), False, id="behind a part with entries in between"),
        pytest.param([(10, 19), (0, 9)], (0, 9), False, id="behind its like and another"),
    ],
)
def test_consecutive_replies_are_handled_together(
    before: list[tuple[int, int]], own: tuple[int, int], is_first: bool
) -> None:
    """If no earlier part waits for them."""
    part = Slice(*own)
    parts = [*(Slice(*ids) for ids in before), part, Slice(*own)]

    assert has_first_claim(cast(Any, parts), cast(Any, part)) is is_first


@pytest.mark.parametrize("reads_batches", [False, True], ids=["singles", "batches"])
@in_scene("reads_batches")
async def test_slices_and_repeated_checks_get_their_own_replies(
    scene: Scene, reads_batches: bool
) -> None:
    scene.fill(range(900))

    def reads(start: int, stop: int, **options: Any) -> Any:
        ids = range(start, stop)
        return scene.run(scene.halves(0, reads={scene.a.bookie_id: ids}, **options))

    results = await asyncio.gather(
        reads(0, 300),
        reads(300, 600),
        reads(600, 900),
        reads(150, 450, target=None),
        reads(0, 900, target=None),
    )

    assert [result.entry_count for result in results] == [300, 300, 300, 300, 900]
    assert not any(result.failures or result.unwritten for result in results)
