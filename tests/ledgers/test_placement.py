"""Choosing bookies without rules: by load, locality and free space."""

from collections import Counter
from collections.abc import Collection, Mapping
from random import Random

import pytest

from ledgers.errors import NotEnoughBookiesError
from ledgers.model import BookieId
from ledgers.placement import (
    Adherence,
    Candidate,
    NoRule,
    PlacementPolicy,
    RandomPlacement,
    Weighting,
)

A, B, C, D, E = (BookieId(f"bookie-{name}:3181") for name in "abcde")
Y, Z = BookieId("bookie-y:3181"), BookieId("bookie-z:3181")
SEEDS = range(50)


def ensemble_of(
    names: list[BookieId], size: int, *, seed: int, excluded: Collection[BookieId] = ()
) -> tuple[BookieId, ...]:
    policy = RandomPlacement(Random(seed))
    candidates = [Candidate(bookie=bookie) for bookie in names]
    return policy.choose_ensemble(candidates, size, write_quorum=size, excluded=excluded)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_ensemble_has_no_bookie_twice_and_no_excluded_one(seed: int) -> None:
    chosen = ensemble_of([A, B, C, D, A, B], 3, seed=seed, excluded=[C])

    assert sorted(chosen) == [A, B, D]


def test_every_place_of_an_ensemble_can_get_every_bookie() -> None:
    chosen = [ensemble_of([A, B, C], 2, seed=seed) for seed in SEEDS]

    assert [{ensemble[index] for ensemble in chosen} for index in (0, 1)] == [{A, B, C}] * 2


def test_too_few_bookies_for_an_ensemble_are_an_error() -> None:
    with pytest.raises(NotEnoughBookiesError):
        ensemble_of([A, B, C], 3, seed=0, excluded=[C])


@pytest.mark.parametrize(
    ("load_bytes", "excluded", "local", "possible"),
    [
        pytest.param({C: 0, D: 0}, set(), None, {C, D}, id="equals are drawn by lot"),
        pytest.param({C: 9, D: 1}, set(), None, {D}, id="the least loaded"),
        pytest.param({C: 9, D: 1}, set(), C, {D}, id="load counts more than being local"),
        pytest.param({C: 1, D: 1, E: 1}, set(), D, {D}, id="among equals the local bookie"),
        pytest.param({A: 0, C: 9}, set(), None, {C}, id="a member gets no second place"),
        pytest.param({A: 0, C: 9}, set(), A, {C}, id="not even the local member"),
        pytest.param({C: 0, D: 9}, {C}, None, {D}, id="never an excluded bookie"),
        pytest.param({C: 0, D: 9}, {C}, C, {D}, id="not even the excluded local bookie"),
        pytest.param(
            {C: 0}, set(), E, {C}, id="a local bookie that accepts no writes is no candidate"
        ),
    ],
)
def test_a_replacement_is_chosen_by_load_locality_then_at_random(
    load_bytes: dict[BookieId, int],
    excluded: set[BookieId],
    local: BookieId | None,
    possible: set[BookieId],
) -> None:
    chosen = {
        RandomPlacement(Random(seed), local=local).choose_replacement(
            [Candidate(bookie=bookie, load_bytes=load) for bookie, load in load_bytes.items()],
            ensemble=(A, B),
            index=0,
            write_quorum=2,
            excluded=excluded,
        )
        for seed in SEEDS
    }

    assert chosen == possible


def test_without_a_candidate_there_is_an_error() -> None:
    policy = RandomPlacement(Random(0))

    with pytest.raises(NotEnoughBookiesError, match="no writable bookie is left to take over"):
        policy.choose_replacement(
            [Candidate(bookie=bookie) for bookie in (A, B, C)],
            ensemble=(A, B),
            index=1,
            write_quorum=2,
            excluded={C},
        )


def test_the_same_seed_makes_the_same_choice() -> None:
    """In any order of the candidates."""

    def chosen(names: str) -> BookieId:
        return RandomPlacement(Random(7)).choose_replacement(
            [Candidate(bookie=BookieId(name)) for name in names],
            ensemble=(Y, Z),
            index=0,
            write_quorum=2,
        )

    assert chosen("abcdefgh") == chosen("hgfedcba")


def test_without_a_rule_every_ensemble_adheres() -> None:
    policy: PlacementPolicy = RandomPlacement(Random(0))

    assert policy.adherence((A, B), write_quorum=2, ack_quorum=1) is Adherence.STRICT


# --- Weighted by free space -----------------------------------------------------------------------

DRAWS = 4_000


def shares(
    free_bytes: Mapping[BookieId, int | None], *, multiple_max: float = 3.0, seed: int = 5
) -> dict[BookieId, float]:
    """Return how often each bookie is chosen, as a share."""
    policy = PlacementPolicy(NoRule(), Random(seed), weighting=Weighting(multiple_max=multiple_max))
    candidates = [Candidate(bookie=b, free_bytes=free) for b, free in free_bytes.items()]
    chosen = Counter(
        policy.choose_replacement(candidates, ensemble=(Y, Z), index=0, write_quorum=2)
        for _ in range(DRAWS)
    )
    return {bookie: chosen[bookie] / DRAWS for bookie in free_bytes}


@pytest.mark.parametrize(
    ("free_bytes", "expected"),
    [
        pytest.param({A: 100, B: 200, C: 100}, [0.25, 0.5, 0.25], id="by free space"),
        pytest.param({A: 10, B: 10, C: 9000}, [0.2, 0.2, 0.6], id="at most 3 times the median"),
        pytest.param({A: 10, B: 20, C: None}, [0.222, 0.444, 0.333], id="unknown is the median"),
        pytest.param({A: None, B: None}, [0.5, 0.5], id="nothing is known"),
        pytest.param(
            {A: 10, B: 30, C: 0}, [0.2, 0.6, 0.2], id="a full bookie like the next fullest"
        ),
        pytest.param({A: 0, B: 0}, [0.5, 0.5], id="all are full"),
        pytest.param({A: 0, B: 0, C: 7}, [0.333, 0.333, 0.333], id="most are full"),
    ],
)
def test_weighted_choices_follow_the_free_space(
    free_bytes: dict[BookieId, int | None], expected: list[float]
) -> None:
    found = shares(free_bytes)

    assert list(found.values()) == pytest.approx(expected, abs=0.03)


def test_without_a_bound_an_empty_bookie_gets_nearly_all() -> None:
    assert shares({A: 10, B: 10, C: 980}, multiple_max=0)[C] == pytest.approx(0.98, abs=0.02)


def test_of_two_drawn_by_weight_the_less_loaded_is_chosen() -> None:
    policy = PlacementPolicy(NoRule(), Random(3), weighting=Weighting())
    candidates = [
        Candidate(bookie=A, free_bytes=100, load_bytes=10),
        Candidate(bookie=B, free_bytes=100, load_bytes=0),
    ]

    chosen = Counter(
        policy.choose_replacement(candidates, ensemble=(Y, Z), index=0, write_quorum=2)
        for _ in range(DRAWS)
    )

    assert chosen[B] / DRAWS == pytest.approx(0.75, abs=0.03)


def test_ensembles_are_weighted_too() -> None:
    policy = PlacementPolicy(NoRule(), Random(4), weighting=Weighting())
    candidates = [Candidate(bookie=b, free_bytes=n) for b, n in ((A, 10), (B, 10), (C, 20))]

    first = Counter(policy.choose_ensemble(candidates, 1, write_quorum=1)[0] for _ in range(DRAWS))

    assert first[C] / DRAWS == pytest.approx(0.5, abs=0.03)
