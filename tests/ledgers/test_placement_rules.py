"""Racks, regions and zones: which arrangements keep the rules, and which bookie takes over."""

from collections import Counter
from collections.abc import Mapping

import pytest

from ledgers.errors import NotEnoughBookiesError
from ledgers.model import BookieId
from ledgers.placement import (
    DEFAULT_RACK,
    Adherence,
    Candidate,
    RackRule,
    RegionRule,
    Rule,
    ZoneRule,
)
from tests.ledgers.placing import ENFORCED, SEEDS, named, policy_of

FAIL, SOFT, STRICT = Adherence.FAIL, Adherence.SOFT, Adherence.STRICT


# --- What a rule says of an ensemble that stands ---------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "arrangement", "write_quorum", "ack_quorum", "expected"),
    [
        pytest.param(RackRule(), "/a /b /c", 3, 2, STRICT, id="racks: three of three"),
        pytest.param(RackRule(), "/a /b /a", 3, 2, STRICT, id="racks: two are enough"),
        pytest.param(RackRule(), "/a /a /a", 3, 2, FAIL, id="racks: one"),
        pytest.param(RackRule(), "/a", 1, 1, STRICT, id="racks: a single copy has one rack"),
        pytest.param(RackRule(), "/a /b /a /b", 2, 2, STRICT, id="racks: each window of two"),
        pytest.param(RackRule(), "/a /b /b /a", 2, 2, FAIL, id="racks: one window of two fails"),
        pytest.param(RackRule(), "/a /b /c /a", 2, 2, FAIL, id="racks: the window over the end"),
        pytest.param(RackRule(min_racks=3), "/a /b /a", 3, 2, FAIL, id="racks: three are wanted"),
        pytest.param(RackRule(min_racks=3), "/a /b", 2, 2, STRICT, id="racks: as many as copies"),
        pytest.param(
            RackRule(), f"/a {DEFAULT_RACK}", 2, 2, STRICT, id="racks: the default rack is one"
        ),
        pytest.param(
            RackRule(is_enforced=True),
            f"/a {DEFAULT_RACK}",
            2,
            2,
            FAIL,
            id="racks, enforced: the default rack is none",
        ),
        pytest.param(RegionRule(), "/x/1 /y/1 /z/1", 3, 2, STRICT, id="regions: three"),
        pytest.param(RegionRule(), "/x/1 /x/2 /y/1", 3, 2, FAIL, id="regions: x alone can ack"),
        pytest.param(RegionRule(), "/x/1 /x/2 /y/1", 3, 3, STRICT, id="regions: x alone cannot"),
        pytest.param(RegionRule(), "/x/1 /x/2 /y/1 /y/2", 4, 3, STRICT, id="regions: two by two"),
        pytest.param(
            RegionRule(min_regions=3), "/x/1 /x/2 /y/1 /z/1", 4, 3, FAIL, id="regions: x, y ack"
        ),
        pytest.param(
            RegionRule(), "/x/1 /x/2", 2, 1, STRICT, id="regions: an ack of one is in one"
        ),
        pytest.param(
            RegionRule(min_regions=1), "/x/1 /x/1", 2, 2, STRICT, id="regions: one will do"
        ),
        pytest.param(
            RegionRule(), "/x /y", 2, 2, FAIL, id="regions: of no region, the default one"
        ),
        pytest.param(
            RegionRule(regions=frozenset({"/x", "/y"})),
            "/x/1 /z/1",
            2,
            2,
            FAIL,
            id="regions: z is not among those that are written to",
        ),
        pytest.param(ZoneRule(), "/x/1 /y/1 /z/1", 3, 2, STRICT, id="zones: as many as desired"),
        pytest.param(ZoneRule(), "/x/1 /x/2 /y/1", 3, 2, SOFT, id="zones: as many as must be"),
        pytest.param(ZoneRule(), "/x/1 /x/1 /y/1", 3, 2, FAIL, id="zones: one upgrade domain of x"),
        pytest.param(ZoneRule(), "/x/1 /x/2 /x/3", 3, 2, FAIL, id="zones: one zone"),
        pytest.param(ZoneRule(), "/x/1 /y/1", 2, 2, FAIL, id="zones: W is not above the least"),
        pytest.param(ZoneRule(), "/x/1 /y/1 /z/1 /x/2", 3, 2, FAIL, id="zones: E is no multiple"),
        pytest.param(ZoneRule(), "/x/1 /y/1 /nowhere", 3, 2, FAIL, id="zones: one is in no zone"),
        pytest.param(
            ZoneRule(is_enforced=False), "/x/1 /y/1 /nowhere", 3, 2, FAIL, id="zones, not enforced"
        ),
        pytest.param(
            ZoneRule(), "/x/1 /y/1 /z/1 /x/2 /y/2 /z/2", 3, 2, STRICT, id="zones: each window"
        ),
        pytest.param(
            ZoneRule(), "/x/1 /y/1 /z/1 /z/2 /y/2 /x/2", 3, 2, SOFT, id="zones: one window short"
        ),
    ],
)
def test_an_ensemble_that_stands_is_judged(
    rule: Rule, arrangement: str, write_quorum: int, ack_quorum: int, expected: Adherence
) -> None:
    racks = named(arrangement.split())

    found = policy_of(rule, racks).adherence(
        tuple(racks), write_quorum=write_quorum, ack_quorum=ack_quorum
    )

    assert found is expected


# --- Who takes over ------------------------------------------------------------------------------


def taking_over(
    rule: Rule,
    arrangement: str,
    candidates: str,
    *,
    index: int = 0,
    write_quorum: int = 3,
    ack_quorum: int | None = None,
    loads: Mapping[str, int] | None = None,
    local: str | None = None,
) -> Counter[str]:
    """The racks that the place falls to, and how often. Members are away, and no candidates."""
    members = named(arrangement.split())
    others = {BookieId(f"new-{number}"): rack for number, rack in enumerate(candidates.split())}
    chosen: Counter[str] = Counter()
    for seed in SEEDS:
        taker = policy_of(rule, members, seed=seed, local=local).choose_replacement(
            [
                Candidate(bookie=bookie, rack=rack, load_bytes=(loads or {}).get(bookie, 0))
                for bookie, rack in others.items()
            ],
            ensemble=tuple(members),
            index=index,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
        )
        chosen[others[taker]] += 1
    return chosen


RACKS_3 = RackRule(min_racks=3)


@pytest.mark.parametrize(
    ("rule", "arrangement", "candidates", "expected"),
    [
        pytest.param(RackRule(), "/a /b /b", "/a /b", {"/a"}, id="the rack of the one replaced"),
        pytest.param(RackRule(), "/a /b /b", "/c /b", {"/c"}, id="or any that keeps the rule"),
        pytest.param(RackRule(), "/a /b /c", "/a /b", {"/a"}, id="spread further than it must be"),
        pytest.param(RackRule(), "/a /b /c", "/b /b", {"/b"}, id="no further where it cannot be"),
        pytest.param(
            RackRule(), "/a /b /b", "/b /b", {"/b"}, id="gives way where it cannot be kept"
        ),
        pytest.param(
            RACKS_3, "/a /b /b", "/c /b", {"/c"}, id="lost already, but no worse than now"
        ),
        pytest.param(ENFORCED, "/a /b /b", f"/c {DEFAULT_RACK}", {"/c"}, id="nobody from nowhere"),
        pytest.param(
            RackRule(), "/a /b /b", f"{DEFAULT_RACK} /b", {DEFAULT_RACK}, id="unless not enforced"
        ),
        pytest.param(
            RackRule(min_racks=3, is_enforced=True),
            "/a /b /b",
            "/b /b",
            {"/b"},
            id="an enforced rule that nobody can keep any more binds nobody",
        ),
        pytest.param(RegionRule(), "/x/1 /y/1 /z/1", "/x/2 /y/2", {"/x/2"}, id="the same region"),
        pytest.param(
            RegionRule(), "/x/1 /y/1 /z/1", "/x/2 /x/1", {"/x/2", "/x/1"}, id="any of its racks"
        ),
        pytest.param(
            RegionRule(min_regions=1), "/x/1 /x/2 /y/1", "/x/2 /x/3", {"/x/3"}, id="another rack"
        ),
        pytest.param(
            RegionRule(regions=frozenset({"/x", "/y"}), min_regions=1),
            "/x/1 /y/1 /y/2",
            "/z/1 /y/3",
            {"/y/3"},
            id="a region that is written to",
        ),
        pytest.param(
            RegionRule(is_enforced=False), "/x/1 /y/1 /z/1", "/y/2", {"/y/2"}, id="one or none"
        ),
        pytest.param(
            RegionRule(min_regions=3),
            "/x/1 /x/2 /x/3",
            "/y/1 /x/4",
            {"/y/1"},
            id="an enforced rule that nobody can keep any more, of regions",
        ),
        pytest.param(ZoneRule(), "/x/1 /y/1 /z/1", "/x/2 /y/2", {"/x/2"}, id="the desired zones"),
        pytest.param(ZoneRule(), "/x/1 /y/1 /z/1", "/y/1 /y/2", {"/y/2"}, id="two upgrade domains"),
        pytest.param(
            ZoneRule(is_enforced=False), "/x/1 /y/1 /z/1", "/nowhere", {"/nowhere"}, id="or nowhere"
        ),
    ],
)
def test_the_rule_decides_who_takes_over(
    rule: Rule, arrangement: str, candidates: str, expected: set[str]
) -> None:
    assert set(taking_over(rule, arrangement, candidates)) == expected


@pytest.mark.parametrize(
    ("rule", "arrangement", "candidates", "words"),
    [
        pytest.param(ENFORCED, "/a /b /b", "/b /b", "at least 2 racks", id="racks"),
        pytest.param(ENFORCED, "/a /b /c", DEFAULT_RACK, "at least 2 racks", id="unknown rack"),
        pytest.param(RegionRule(), "/x/1 /y/1 /z/1", "/y/2", "at least 2 regions", id="regions"),
        pytest.param(
            RegionRule(regions=frozenset({"/x", "/y"}), min_regions=1),
            "/x/1 /y/1 /y/2",
            "/z/1",
            "regions of /x, /y",
            id="a region that is not written to",
        ),
        pytest.param(ZoneRule(), "/x/1 /y/1 /z/1", "/y/1", "two upgrade domains", id="zones"),
        pytest.param(ZoneRule(), "/x/1 /y/1 /z/1", "/nowhere", "at least 2 zones", id="no zone"),
    ],
)
def test_where_an_enforced_rule_cannot_be_kept_nobody_takes_over(
    rule: Rule, arrangement: str, candidates: str, words: str
) -> None:
    with pytest.raises(NotEnoughBookiesError, match=words):
        taking_over(rule, arrangement, candidates, ack_quorum=2)


def test_only_the_write_sets_of_the_place_decide() -> None:
    """E 4, W 2: the bookie at index 0 shares entries with those at 1 and 3, not with that at 2."""
    taken = taking_over(ENFORCED, "/a /b /c /d", "/b /c /d", write_quorum=2)

    assert set(taken) == {"/c"}


def test_a_member_that_is_away_counts_where_it_was() -> None:
    """As BookKeeper's placement check does not (G19)."""
    racks = named(["/a", "/b"])
    policy = policy_of(RackRule(), racks)

    assert policy.adherence(tuple(racks), write_quorum=2, ack_quorum=2) is STRICT
    assert set(taking_over(ENFORCED, "/a /b", "/a /b", write_quorum=2)) == {"/a"}


def test_among_equally_good_racks_the_local_bookie_is_preferred() -> None:
    assert set(taking_over(RackRule(), "/a /b /b", "/a /c /d", local="new-1")) == {"/c"}


def test_the_local_bookie_is_not_preferred_to_a_better_rack() -> None:
    assert set(taking_over(RackRule(), "/a /b /c", "/a /b", local="new-1")) == {"/a"}


def test_among_bookies_of_equally_good_racks_the_least_loaded_takes_over() -> None:
    loads = {"new-0": 10, "new-1": 5, "new-2": 20}

    assert set(taking_over(RackRule(), "/a /b /b", "/a /c /d", loads=loads)) == {"/c"}


# --- The last bookie of a rack does not take over from all the others (G28) --------------------------


@pytest.mark.compat("G28", verdict="better")
def test_the_last_bookie_of_a_rack_is_given_its_fair_shares_only() -> None:
    candidates = "/a" + " /b" * 10 + " /c" * 10

    taken = taking_over(RackRule(), "/a /b /c", candidates)

    assert 0 < taken["/a"] < len(SEEDS) / 2


@pytest.mark.compat("G28", verdict="better")
def test_a_rack_with_much_under_way_is_spared() -> None:
    """It would spread the copies further, but is given more than three times the average
    already."""
    loads = {"new-0": 1000}

    assert taking_over(RackRule(), "/a /b /c", "/a /b /b /c", loads=loads)["/a"] == 0


def test_a_rack_with_many_bookies_left_is_kept_to() -> None:
    taken = taking_over(RackRule(), "/a /b /c", "/a /a /b /b /c /c")

    assert set(taken) == {"/a"}


def test_what_the_rule_demands_is_not_given_up_for_balance() -> None:
    loads = {"new-0": 1000}

    taken = taking_over(RACKS_3, "/a /b /c", "/a" + " /b" * 10 + " /c" * 10, loads=loads)

    assert set(taken) == {"/a"}
