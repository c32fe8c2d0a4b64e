from random import Random

import pytest

from ledgers.errors import NotEnoughBookiesError
from ledgers.metadata import BookieId
from ledgers.placement import (
    Candidate,
    PlacementPolicy,
    RandomPlacement,
    choose_ensemble,
    choose_replacement,
)

A, B, C, D, E = (BookieId(f"bookie-{name}:3181") for name in "abcde")
SEEDS = range(50)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_ensemble_holds_no_bookie_twice_and_none_that_was_excluded(seed: int) -> None:
    chosen = choose_ensemble([A, B, C, D, A, B], 3, random=Random(seed), excluded=[C])

    assert sorted(chosen) == [A, B, D]


def test_every_place_of_an_ensemble_falls_to_every_bookie_now_and_then() -> None:
    chosen = [choose_ensemble([A, B, C], 2, random=Random(seed)) for seed in SEEDS]

    assert [{ensemble[index] for ensemble in chosen} for index in (0, 1)] == [{A, B, C}] * 2


def test_too_few_bookies_for_an_ensemble_is_an_error() -> None:
    with pytest.raises(NotEnoughBookiesError):
        choose_ensemble([A, B, C], 3, random=Random(0), excluded=[C])


@pytest.mark.parametrize(
    ("load_bytes", "excluded", "local", "possible"),
    [
        pytest.param({C: 0, D: 0}, set(), None, {C, D}, id="equals are drawn by lot"),
        pytest.param({C: 9, D: 1}, set(), None, {D}, id="the least loaded"),
        pytest.param({C: 9, D: 1}, set(), C, {D}, id="load counts more than being local"),
        pytest.param({C: 1, D: 1, E: 1}, set(), D, {D}, id="among equals the local one"),
        pytest.param({A: 0, C: 9}, set(), None, {C}, id="a member takes over no second place"),
        pytest.param({A: 0, C: 9}, set(), A, {C}, id="not even the local member"),
        pytest.param({C: 0, D: 9}, {C}, None, {D}, id="never an excluded one"),
        pytest.param({C: 0, D: 9}, {C}, C, {D}, id="not even the local excluded one"),
        pytest.param({C: 0}, set(), E, {C}, id="a local bookie that takes no writes is no choice"),
    ],
)
def test_a_replacement_is_chosen_by_load_then_locality_then_lot(
    load_bytes: dict[BookieId, int],
    excluded: set[BookieId],
    local: BookieId | None,
    possible: set[BookieId],
) -> None:
    chosen = {
        choose_replacement(
            candidates=load_bytes,
            ensemble=(A, B),
            excluded=excluded,
            local=local,
            random=Random(seed),
        )
        for seed in SEEDS
    }

    assert chosen == possible


def test_no_bookie_left_to_take_over_is_an_error() -> None:
    with pytest.raises(NotEnoughBookiesError):
        choose_replacement(
            candidates={A: 0, B: 0, C: 0},
            ensemble=(A, B),
            excluded={C},
            local=None,
            random=Random(0),
        )


def test_the_same_seed_chooses_the_same_whatever_the_order_of_the_candidates() -> None:
    def chosen(names: str) -> BookieId:
        return choose_replacement(
            candidates={BookieId(name): 0 for name in names},
            ensemble=(),
            excluded=(),
            local=None,
            random=Random(7),
        )

    assert chosen("abcdefgh") == chosen("hgfedcba")


def test_the_random_policy_makes_these_choices_among_candidates() -> None:
    policy: PlacementPolicy = RandomPlacement(Random(0), local=D)
    candidates = [Candidate(bookie=bookie) for bookie in (A, B, C, D)]

    ensemble = policy.choose_ensemble(candidates, 3, write_quorum=2, excluded=[D])
    replacement = policy.choose_replacement(
        candidates, ensemble=(A, B), index=0, write_quorum=2, excluded=()
    )

    assert sorted(ensemble) == [A, B, C]
    assert replacement == D
