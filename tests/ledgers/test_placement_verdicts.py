"""The verdict on an ensemble with unknown racks, and the move that improves a misplaced one."""

from collections.abc import Sequence
from itertools import product
from random import Random

import pytest

from ledgers.errors import NotEnoughBookiesError
from ledgers.model import BookieId
from ledgers.placement import (
    DEFAULT_RACK,
    Adherence,
    Candidate,
    NoRule,
    PlacementPolicy,
    RackRule,
    RegionRule,
    Rule,
    ZoneRule,
)
from ledgers.placement.rules import Shape, judge_racks

FAIL, SOFT, STRICT = Adherence.FAIL, Adherence.SOFT, Adherence.STRICT
UNKNOWN = Adherence.UNKNOWN


def places(arrangement: str) -> tuple[str | None, ...]:
    """Parse "/a ? /b": a question mark is an unknown rack."""
    return tuple(None if place == "?" else place for place in arrangement.split())


# --- Unknown racks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "arrangement", "write_quorum", "expected"),
    [
        pytest.param(RackRule(), "/a ?", 2, UNKNOWN, id="racks: it may share the rack"),
        pytest.param(RackRule(), "? ? ?", 3, UNKNOWN, id="racks: nothing is known at all"),
        pytest.param(RackRule(), "/a /b ?", 3, STRICT, id="racks: well placed wherever it is"),
        pytest.param(RackRule(), "/a /a ?", 2, FAIL, id="racks: badly placed wherever it is"),
        pytest.param(RackRule(), "/a ? /b", 2, UNKNOWN, id="racks: one window depends on it"),
        pytest.param(RackRule(), "?", 1, STRICT, id="racks: a single copy may be anywhere"),
        pytest.param(
            RackRule(is_enforced=True), "/a /b ?", 3, UNKNOWN, id="racks, enforced: or nowhere"
        ),
        pytest.param(RegionRule(), "/x/1 /y/1 ?", 3, UNKNOWN, id="regions: x may be two of three"),
        pytest.param(RegionRule(), "/x/1 /x/2 ?", 3, FAIL, id="regions: x alone can acknowledge"),
        pytest.param(ZoneRule(), "/x/1 /y/1 ?", 3, UNKNOWN, id="zones: it may be in no zone"),
        pytest.param(ZoneRule(), "/x/1 /y/1 ? /z/1", 3, FAIL, id="zones: E is no multiple of W"),
        pytest.param(NoRule(), "? ?", 2, STRICT, id="no rule: it does not matter"),
    ],
)
@pytest.mark.compat(
    "G19",
    verdict="better",
    why="if the verdict depends on a bookie in an unknown place, the check says so instead of "
    "'fail'",
)
def test_a_verdict_holds_wherever_the_unknown_bookies_are(
    rule: Rule, arrangement: str, write_quorum: int, expected: Adherence
) -> None:
    """Otherwise there is none."""
    racks = places(arrangement)
    shape = Shape(size=len(racks), write_quorum=write_quorum, ack_quorum=min(2, write_quorum))

    assert judge_racks(rule, shape, racks) is expected


@pytest.mark.parametrize("rule", [RackRule(), RackRule(min_racks=3), RegionRule(), ZoneRule()])
@pytest.mark.parametrize("seed", range(60))
def test_random_verdicts_hold_wherever_the_unknown_bookies_are(rule: Rule, seed: int) -> None:
    """Compared with every place where they can be."""
    rng = Random(seed)
    everywhere = ("/x/1", "/x/2", "/y/1", "/z/1", "/elsewhere/9", DEFAULT_RACK)
    size = rng.choice((3, 4))
    shape = Shape(size=size, write_quorum=rng.choice((2, 3)), ack_quorum=2)
    racks = [rng.choice((*everywhere, None, None)) for _ in range(size)]

    said = judge_racks(rule, shape, tuple(racks))

    choices = product(*([rack] if rack else everywhere for rack in racks))
    possible = {judge_racks(rule, shape, choice) for choice in choices}
    assert possible == {said} or (said is UNKNOWN and None in racks), (racks, possible)


# --- Moves ----------------------------------------------------------------------------------------


def moves(
    rule: Rule, arrangement: str, candidates: str, *, write_quorum: int = 2, seed: int = 0
) -> dict[int, str]:
    """Return the targets by bookie index. Members are called 0, 1, ...; candidates new-0, new-1,
    ..."""
    members = {BookieId(str(number)): rack for number, rack in enumerate(arrangement.split())}
    found = PlacementPolicy(rule, Random(seed), locate=members.__getitem__).choose_moves(
        [
            Candidate(bookie=BookieId(f"new-{number}"), rack=rack)
            for number, rack in enumerate(candidates.split())
        ],
        ensemble=tuple(members),
        write_quorum=write_quorum,
        ack_quorum=write_quorum,
    )
    return {each.index: each.target for each in found}


@pytest.mark.parametrize(
    ("arrangement", "candidates", "possible"),
    [
        pytest.param("/a /a", "/a /b", [{0: "new-1"}, {1: "new-1"}], id="to the other rack"),
        pytest.param(
            "/a /a /a /b", "/c", [{1: "new-0"}], id="the move that corrects two write sets"
        ),
        pytest.param(
            "/a /a /b", "/a /b /c", [{0: "new-2"}, {1: "new-2"}], id="not to its neighbour's rack"
        ),
        pytest.param(
            "/a /a /b /b",
            "/a /b",
            [{0: "new-1", 3: "new-0"}, {1: "new-1", 2: "new-0"}],
            id="two that are of no use alone",
        ),
    ],
)
def test_a_move_removes_as_many_violations_as_possible(
    arrangement: str, candidates: str, possible: list[dict[int, str]]
) -> None:
    for seed in range(20):
        assert moves(RackRule(), arrangement, candidates, seed=seed) in possible


@pytest.mark.parametrize(
    ("rule", "arrangement", "candidates", "write_quorum"),
    [
        pytest.param(RackRule(), "/a /a", "/a", 2, id="the same rack again"),
        pytest.param(RackRule(), "/a /a", "", 2, id="no bookie is writable"),
        pytest.param(RackRule(), "/a /b", "/c", 2, id="it is well placed"),
        pytest.param(
            RackRule(), "/a /a", DEFAULT_RACK, 2, id="the rack of the candidate is unknown"
        ),
        pytest.param(RackRule(min_racks=3), "/a /b /b", "/a", 3, id="no more racks than before"),
        pytest.param(RackRule(), "/a /a /b /b", "/a", 2, id="two must move, and one can"),
        pytest.param(ZoneRule(), "/x/1 /y/1", "/z/1", 2, id="no move corrects its shape"),
    ],
)
def test_the_rule_is_named_if_no_move_improves_the_placement(
    rule: Rule, arrangement: str, candidates: str, write_quorum: int
) -> None:
    with pytest.raises(
        NotEnoughBookiesError, match=r"bring the ensemble closer to the rule: .* in each write set"
    ):
        moves(rule, arrangement, candidates, write_quorum=write_quorum)


@pytest.mark.parametrize("seed", range(40))
def test_repeated_moves_come_to_an_end(seed: int) -> None:
    """Each leaves fewer violations; with three racks to choose from, none in the end."""
    rng = Random(seed)
    racks: dict[BookieId, str] = {}

    def bookies(prefix: str, racks_of: Sequence[str]) -> list[BookieId]:
        found = [BookieId(f"{prefix}{number}") for number in range(len(racks_of))]
        racks.update(zip(found, racks_of, strict=True))
        return found

    ensemble = bookies("m", rng.choices(("/a", "/b", "/c"), k=5))
    others = bookies("new-", ("/a", "/b", "/c") * 3)
    policy = PlacementPolicy(RackRule(), rng, locate=racks.__getitem__)
    candidates = [Candidate(bookie=each, rack=racks[each]) for each in others]

    moved = 0
    while policy.adherence(ensemble, write_quorum=2, ack_quorum=2) is FAIL:
        found = policy.choose_moves(candidates, ensemble=ensemble, write_quorum=2, ack_quorum=2)
        assert len(found) == 1
        ensemble[found[0].index] = found[0].target
        moved += 1

    assert moved <= 5
