"""New ensembles under rules of racks, regions and zones."""

from ledgers.model import BookieId
from ledgers.placement import Candidate, RackRule, RegionRule, Rule
from tests.ledgers.placing import SEEDS, named, policy_of


def ensembles(
    rule: Rule, racks: str, size: int, *, write_quorum: int, ack_quorum: int = 2
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


def test_a_new_ensemble_is_spread_evenly_over_regions_then_racks() -> None:
    racks = "/x/1 /x/1 /x/2 /y/1 /y/1 /y/2"

    for arrangement in ensembles(RegionRule(), racks, 4, write_quorum=4, ack_quorum=3):
        assert sorted(arrangement) == ["/x/1", "/x/2", "/y/1", "/y/2"]


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
