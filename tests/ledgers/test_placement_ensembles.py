"""New ensembles under rules of racks, regions and zones."""

import pytest

from ledgers.errors import NotEnoughBookiesError
from ledgers.model import BookieId
from ledgers.placement import DEFAULT_RACK, Candidate, RackRule, RegionRule, Rule, ZoneRule
from tests.ledgers.placing import ENFORCED, SEEDS, named, policy_of


def ensembles(
    rule: Rule,
    racks: str,
    size: int,
    *,
    write_quorum: int,
    ack_quorum: int = 2,
) -> list[tuple[str, ...]]:
    there = named(racks.split())
    candidates = [Candidate(bookie=bookie, rack=rack) for bookie, rack in there.items()]
    chosen = [
        policy_of(rule, {}, seed=seed).choose_ensemble(
            candidates, size, write_quorum=write_quorum, ack_quorum=ack_quorum
        )
        for seed in SEEDS
    ]
    assert all(len(set(ensemble)) == size for ensemble in chosen)
    return [tuple(there[bookie] for bookie in ensemble) for ensemble in chosen]


def test_a_new_ensemble_uses_a_different_rack_for_each_place() -> None:
    for arrangement in ensembles(RackRule(), "/a /a /a /b /c", 3, write_quorum=3):
        assert sorted(arrangement) == ["/a", "/b", "/c"]


def test_a_new_ensemble_finds_the_only_order_that_adheres() -> None:
    for arrangement in ensembles(ENFORCED, "/a /a /b /b", 4, write_quorum=2):
        assert arrangement in [("/a", "/b", "/a", "/b"), ("/b", "/a", "/b", "/a")]


def test_a_new_ensemble_is_spread_evenly_over_regions_then_racks() -> None:
    racks = "/x/1 /x/1 /x/2 /y/1 /y/1 /y/2"

    for arrangement in ensembles(RegionRule(), racks, 4, write_quorum=4, ack_quorum=3):
        assert sorted(arrangement) == ["/x/1", "/x/2", "/y/1", "/y/2"]


def test_a_new_ensemble_has_the_desired_number_of_zones() -> None:
    racks = "/x/1 /x/2 /y/1 /y/2 /z/1 /z/2"

    for arrangement in ensembles(ZoneRule(), racks, 6, write_quorum=3):
        assert all(
            len({rack[:2] for rack in (*arrangement, *arrangement)[i : i + 3]}) == 3
            for i in range(6)
        )


@pytest.mark.parametrize(
    ("rule", "racks", "size", "write_quorum"),
    [
        pytest.param(ENFORCED, "/a /a /a", 3, 3, id="one rack"),
        pytest.param(ENFORCED, "/a /a /a /b", 4, 2, id="one rack has too few"),
        pytest.param(ENFORCED, f"/a {DEFAULT_RACK}", 2, 2, id="the other bookie is nowhere"),
        pytest.param(RegionRule(), "/x/1 /x/2 /y/1", 3, 3, id="two regions"),
        pytest.param(ZoneRule(), "/x/1 /y/1 /z/1 /x/2", 4, 3, id="E is no multiple of W"),
    ],
)
def test_no_ensemble_is_made_that_breaks_an_enforced_rule(
    rule: Rule, racks: str, size: int, write_quorum: int
) -> None:
    with pytest.raises(NotEnoughBookiesError, match="without breaking the rule"):
        ensembles(rule, racks, size, write_quorum=write_quorum)


@pytest.mark.parametrize(
    ("racks", "size", "write_quorum", "expected"),
    [
        pytest.param("/a /a /a", 3, 3, ["/a", "/a", "/a"], id="one rack"),
        pytest.param("/a /a /a /b", 4, 2, ["/a", "/a", "/a", "/b"], id="one rack has too few"),
    ],
)
def test_a_rule_that_is_not_enforced_allows_a_worse_ensemble(
    racks: str, size: int, write_quorum: int, expected: list[str]
) -> None:
    for arrangement in ensembles(RackRule(), racks, size, write_quorum=write_quorum):
        assert sorted(arrangement) == expected


def test_a_new_ensemble_is_made_where_copies_are_wanted() -> None:
    """If possible."""
    rule = RegionRule(regions=frozenset({"/x", "/y"}), min_regions=2, is_enforced=False)

    for arrangement in ensembles(rule, "/x/1 /z/1 /z/2 /y/1", 3, write_quorum=3, ack_quorum=2):
        assert {"/x/1", "/y/1"} < set(arrangement)


def test_a_new_ensemble_does_not_prefer_the_local_bookie() -> None:
    candidates = [Candidate(bookie=BookieId(name)) for name in ("a", "b", "c")]

    chosen = {
        policy_of(RackRule(), {}, seed=seed, local="a").choose_ensemble(
            candidates, 1, write_quorum=1
        )
        for seed in SEEDS
    }

    assert len(chosen) == 3
