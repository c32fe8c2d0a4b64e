"""Racks, regions and zones: which ensembles adhere to the rules, and which bookie replaces
another."""

from collections import Counter
from collections.abc import Mapping

import pytest

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


# --- The verdict on an existing ensemble ----------------------------------------------------------


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
        pytest.param(
            RegionRule(), "/x/1 /x/2 /y/1", 3, 0, STRICT, id="regions: A = 0 asks nothing"
        ),
        pytest.param(RegionRule(), "/x/1 /x/2 /y/1", 3, 3, STRICT, id="regions: x alone cannot"),
        pytest.param(RegionRule(), "/x/1 /x/2 /y/1 /y/2", 4, 3, STRICT, id="regions: two by two"),
        pytest.param(
            RegionRule(min_regions=3), "/x/1 /x/2 /y/1 /z/1", 4, 3, FAIL, id="regions: x, y ack"
        ),
        pytest.param(
            RegionRule(),
            "/x/1 /x/2",
            2,
            1,
            STRICT,
            id="regions: an ack quorum of one is in one region",
        ),
        pytest.param(
            RegionRule(min_regions=1), "/x/1 /x/1", 2, 2, STRICT, id="regions: one is enough"
        ),
        pytest.param(
            RegionRule(),
            "/x /y",
            2,
            2,
            FAIL,
            id="regions: a bookie of no region is in the default one",
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
        pytest.param(ZoneRule(), "/x/1 /y/1 /nowhere", 3, 2, FAIL, id="zones: a bookie in no zone"),
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
def test_an_existing_ensemble_is_judged(
    rule: Rule, arrangement: str, write_quorum: int, ack_quorum: int, expected: Adherence
) -> None:
    racks = named(arrangement.split())

    found = policy_of(rule, racks).adherence(
        tuple(racks), write_quorum=write_quorum, ack_quorum=ack_quorum
    )

    assert found is expected


# --- Replacements ---------------------------------------------------------------------------------


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
    """Return the racks of the replacements, and how often each is chosen. Members are absent, and
    no candidates."""
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
        pytest.param(
            ENFORCED, "/a /b /b", f"/c {DEFAULT_RACK}", {"/c"}, id="no candidate, no choice"
        ),
        pytest.param(
            RackRule(), "/a /b /b", f"{DEFAULT_RACK} /b", {DEFAULT_RACK}, id="unless not enforced"
        ),
        pytest.param(
            RackRule(min_racks=3, is_enforced=True),
            "/a /b /b",
            "/b /b",
            {"/b"},
            id="an enforced rule that cannot hold any more does not count",
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
            RegionRule(is_enforced=False), "/x/1 /y/1 /z/1", "/y/2", {"/y/2"}, id="one or no bookie"
        ),
        pytest.param(
            RegionRule(min_regions=3),
            "/x/1 /x/2 /x/3",
            "/y/1 /x/4",
            {"/y/1"},
            id="an enforced rule of regions that cannot hold any more",
        ),
        pytest.param(ZoneRule(), "/x/1 /y/1 /z/1", "/x/2 /y/2", {"/x/2"}, id="the desired zones"),
        pytest.param(ZoneRule(), "/x/1 /y/1 /z/1", "/y/1 /y/2", {"/y/2"}, id="two upgrade domains"),
        pytest.param(
            ZoneRule(is_enforced=False), "/x/1 /y/1 /z/1", "/nowhere", {"/nowhere"}, id="or nowhere"
        ),
    ],
)
def test_the_rule_decides_which_bookie_replaces_another(
    rule: Rule, arrangement: str, candidates: str, expected: set[str]
) -> None:
    assert set(taking_over(rule, arrangement, candidates)) == expected


def test_only_the_write_sets_of_the_bookie_index_decide() -> None:
    """E 4, W 2: the bookie at index 0 shares entries with those at 1 and 3, not with that at 2."""
    taken = taking_over(ENFORCED, "/a /b /c /d", "/b /c /d", write_quorum=2)

    assert set(taken) == {"/c"}


def test_an_absent_member_counts_where_it_was() -> None:
    """BookKeeper's own placement check ignores it (G19)."""
    racks = named(["/a", "/b"])
    policy = policy_of(RackRule(), racks)

    assert policy.adherence(tuple(racks), write_quorum=2, ack_quorum=2) is STRICT
    assert set(taking_over(ENFORCED, "/a /b", "/a /b", write_quorum=2)) == {"/a"}


def test_among_equally_good_racks_the_local_bookie_is_preferred() -> None:
    assert set(taking_over(RackRule(), "/a /b /b", "/a /c /d", local="new-1")) == {"/c"}


def test_the_local_bookie_is_not_preferred_to_a_better_rack() -> None:
    assert set(taking_over(RackRule(), "/a /b /c", "/a /b", local="new-1")) == {"/a"}


def test_among_equally_good_racks_the_least_loaded_is_chosen() -> None:
    loads = {"new-0": 10, "new-1": 5, "new-2": 20}

    assert set(taking_over(RackRule(), "/a /b /b", "/a /c /d", loads=loads)) == {"/c"}


# --- The last bookie of a rack does not replace all the others (G28) ------------------------------


@pytest.mark.compat("G28", verdict="better")
def test_the_last_bookie_of_a_rack_gets_only_its_fair_share() -> None:
    candidates = "/a" + " /b" * 10 + " /c" * 10

    taken = taking_over(RackRule(), "/a /b /c", candidates)

    assert 0 < taken["/a"] < len(SEEDS) / 2


@pytest.mark.compat("G28", verdict="better")
def test_a_rack_with_many_copies_under_way_is_spared() -> None:
    """It would spread copies further, but has more than three times the average already."""
    loads = {"new-0": 1000}

    assert taking_over(RackRule(), "/a /b /c", "/a /b /b /c", loads=loads)["/a"] == 0


def test_a_rack_with_many_bookies_left_is_kept() -> None:
    taken = taking_over(RackRule(), "/a /b /c", "/a /a /b /b /c /c")

    assert set(taken) == {"/a"}


def test_a_demand_of_the_rule_is_more_important_than_balance() -> None:
    loads = {"new-0": 1000}

    taken = taking_over(RACKS_3, "/a /b /c", "/a" + " /b" * 10 + " /c" * 10, loads=loads)

    assert set(taken) == {"/a"}
