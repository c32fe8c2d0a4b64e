"""When a safety hold begins, which bookies it names, and when it ends: the decisions alone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from auditor.safety_hold import BookieCensus, is_warranted, wanted_hold
from auditor.settings import HoldSettings
from ledgers.model import BookieId
from ledgers.placement import DEFAULT_RACK
from ledgers.registration import BookieView, RegisteredBookie
from ledgers.store import Stat
from replication.cluster import ClusterView
from replication.orders import DrainOrder, HoldOrder, MaintenanceWindow, Orders

TEN = tuple(BookieId(f"bookie-{name}:3181") for name in "abcdefghij")
A, B, C, D, E, F, G, H = TEN[:8]
SETTINGS = HoldSettings(share=0.3, bookies_min=3, window_s=120, lasts_s=3_600)
NOW_S, NOW_MS = 10_000.0, 1_700_000_000_000


def census(
    bookies: Sequence[BookieId],
    gone_ago_s: Mapping[BookieId, float],
    *,
    settled: Sequence[BookieId] = (),
    racks: Mapping[BookieId, str] | None = None,
) -> BookieCensus:
    """``gone_ago_s``: how long ago each of the absent ones went."""
    return BookieCensus(
        present=frozenset(bookies) - gone_ago_s.keys(),
        absent_since_s={bookie: NOW_S - ago_s for bookie, ago_s in gone_ago_s.items()},
        settled=frozenset(settled),
        rack_of=lambda bookie: (racks or {}).get(bookie, DEFAULT_RACK),
    )


def wanted(
    found: BookieCensus,
    standing: HoldOrder | None = None,
    *,
    settings: HoldSettings = SETTINGS,
    is_calm: bool = False,
) -> HoldOrder | None:
    return wanted_hold(
        found, standing, settings=settings, now_s=NOW_S, now_ms=NOW_MS, is_calm=is_calm
    )


def all_gone(*bookies: BookieId, ago_s: float = 1) -> dict[BookieId, float]:
    return dict.fromkeys(bookies, ago_s)


# --- The beginning --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bookies", "gone_ago_s", "is_held"),
    [
        pytest.param(TEN, {}, False, id="nobody is away"),
        pytest.param(TEN, all_gone(A, B, C), False, id="the share itself is not more than it"),
        pytest.param(TEN, all_gone(A, B, C, D), True, id="more than the share, and enough"),
        pytest.param((A, B, C), all_gone(A, B), False, id="more than the share, but too few"),
        pytest.param((A, B, C, D, E), all_gone(A, B, C), True, id="three of five"),
        pytest.param((A, B, C), all_gone(A, B, C), True, id="all: it is ZooKeeper that failed"),
        pytest.param(
            TEN, {A: 121, B: 90, C: 60, D: 1}, True, id="within the window, its end included"
        ),
        pytest.param(
            TEN,
            {A: 122, B: 121, C: 60, D: 0},
            False,
            id="too far from each other to be of one wave",
        ),
        pytest.param(
            TEN, {A: 500, B: 400, C: 300, D: 200}, False, id="one after the other, each for itself"
        ),
        pytest.param(
            TEN,
            {A: 900, B: 900, C: 60, D: 60, E: 60},
            True,
            id="of those that were there when the wave began, the share is greater",
        ),
        pytest.param(
            TEN,
            {A: 5_000, B: 5_000, C: 5_000, D: 5_000},
            True,
            id="long ago, but still nobody has marked anything for them",
        ),
    ],
)
def test_a_hold_begins_when_more_than_a_share_and_at_least_so_many_went_at_once(
    bookies: Sequence[BookieId], gone_ago_s: Mapping[BookieId, float], is_held: bool
) -> None:
    hold = wanted(census(bookies, gone_ago_s))

    assert (hold is not None) is is_held
    if hold is not None:
        assert not hold.is_released
        assert not hold.is_by_operator
        assert set(hold.bookies) == gone_ago_s.keys()


@pytest.mark.parametrize(
    ("share", "gone", "is_held"),
    [
        pytest.param(0.0, (A, B), False, id="without a share the number decides: too few"),
        pytest.param(0.0, (A, B, C), True, id="without a share the number decides: enough"),
        pytest.param(1.0, TEN, False, id="more than all of them never go"),
    ],
)
def test_at_its_ends_the_share_leaves_it_to_the_number_or_to_operators(
    share: float, gone: Sequence[BookieId], is_held: bool
) -> None:
    hold = wanted(census(TEN, all_gone(*gone)), settings=replace(SETTINGS, share=share))

    assert (hold is not None) is is_held


RACKS = {A: "/r1", B: "/r1", C: "/r2", D: "/r2", E: "/r3", F: "/r3"}


@pytest.mark.parametrize(
    ("bookies", "gone", "racks", "is_held"),
    [
        pytest.param((A, B, C, D, E, F), (A, B), RACKS, True, id="a whole rack of three"),
        pytest.param((A, B, C, D, E, F), (A, C), RACKS, False, id="halves of two racks"),
        pytest.param((A, B, C, D, E, F), (A, B), {}, False, id="the default rack is none"),
        pytest.param((A, C, D), (A,), RACKS, False, id="a rack of one is no rack"),
        pytest.param(TEN, (A, B), RACKS, False, id="one small rack of many: an ordinary loss"),
        pytest.param(
            (A, B, C, D, E),
            (A, B),
            {**RACKS, C: "/r1"},
            False,
            id="somebody is left in the rack",
        ),
    ],
)
def test_a_whole_rack_is_enough_where_the_share_is_exceeded_as_well(
    bookies: Sequence[BookieId],
    gone: Sequence[BookieId],
    racks: Mapping[BookieId, str],
    is_held: bool,
) -> None:
    hold = wanted(census(bookies, all_gone(*gone), racks=racks))

    assert (hold is not None) is is_held
    if hold is not None:
        assert "/r1" in hold.reason


@pytest.mark.parametrize(
    ("gone_ago_s", "settled", "is_held"),
    [
        pytest.param(all_gone(A, B, C, D, ago_s=5_000), (A, B, C, D), False, id="handled long ago"),
        pytest.param(
            all_gone(A, B, C, D, ago_s=5_000), (A, B), False, id="too few are not handled yet"
        ),
        pytest.param(
            {A: 3, B: 2, C: 1, D: 0},
            (A, B),
            True,
            id="without a recovery delay the first of a wave are marked before the last go",
        ),
    ],
)
def test_bookies_whose_ledgers_are_marked_count_only_while_the_wave_may_still_come(
    gone_ago_s: Mapping[BookieId, float], settled: Sequence[BookieId], is_held: bool
) -> None:
    assert (wanted(census(TEN, gone_ago_s, settled=settled)) is not None) is is_held


def test_a_hold_says_why_and_until_when() -> None:
    hold = wanted(census(TEN, all_gone(A, B, C, D)))

    assert hold is not None
    assert hold.reason == "4 of 10 bookies disappeared within 120 s"
    assert (hold.since_ms, hold.until_ms) == (NOW_MS, NOW_MS + 3_600_000)


def test_a_hold_that_is_set_to_last_has_no_end_of_its_own() -> None:
    hold = wanted(census(TEN, all_gone(A, B, C, D)), settings=replace(SETTINGS, lasts_s=0))

    assert hold is not None
    assert hold.until_ms is None


def test_none_begins_where_it_is_switched_off_but_an_operators_stands() -> None:
    off = replace(SETTINGS, enabled=False)
    by_operator = HoldOrder(since_ms=1, is_by_operator=True)
    found = census(TEN, all_gone(A, B, C, D))

    assert wanted(found, settings=off) is None
    assert wanted(found, by_operator, settings=off) == by_operator
    assert wanted(found, HoldOrder(since_ms=1, bookies=(A, B, C, D)), settings=off) is None


# --- While it stands ------------------------------------------------------------------------------

HELD = HoldOrder(since_ms=NOW_MS - 1_000, until_ms=NOW_MS + 1_000, bookies=(A, B, C, D))


def test_one_that_stands_is_left_as_it_is() -> None:
    assert wanted(census(TEN, all_gone(A, B, C, D)), HELD) == HELD
    assert wanted(census(TEN, all_gone(A, B, C)), HELD) == HELD, "not yet for long enough"


def test_whoever_goes_while_it_stands_is_named_as_well() -> None:
    hold = wanted(census(TEN, {**all_gone(A, B, C, D, ago_s=900), E: 0}), HELD)

    assert hold == replace(HELD, bookies=(A, B, C, D, E))


def test_one_that_is_not_warranted_for_long_enough_is_taken_back() -> None:
    assert wanted(census(TEN, all_gone(A)), HELD, is_calm=True) is None


@pytest.mark.parametrize(
    ("gone", "is_still"),
    [
        pytest.param((A, B, C, D), True, id="nobody is back"),
        pytest.param((A, B, C), False, id="one is back, and they are no more than the share"),
        pytest.param((), False, id="all are back"),
        pytest.param((E, F, G, H), False, id="others are none of its concern"),
    ],
)
def test_a_hold_is_warranted_by_its_own_bookies_whenever_they_went(
    gone: Sequence[BookieId], is_still: bool
) -> None:
    gone_ago_s = {bookie: 1_000.0 * number for number, bookie in enumerate(gone)}

    assert is_warranted(HELD, census(TEN, gone_ago_s), SETTINGS) is is_still


def test_an_operators_stands_whatever_the_bookies_do() -> None:
    by_operator = HoldOrder(since_ms=1, is_by_operator=True)

    for found in (census(TEN, {}), census(TEN, all_gone(*TEN))):
        assert wanted(found, by_operator, is_calm=True) == by_operator


# --- Released -------------------------------------------------------------------------------------

RELEASED = replace(HELD, is_released=True)
OVER = replace(HELD, until_ms=NOW_MS)


@pytest.mark.parametrize("over", [RELEASED, OVER], ids=["by an operator", "by its own end"])
def test_nothing_holds_again_on_account_of_the_bookies_it_was_about(over: HoldOrder) -> None:
    found = census(TEN, all_gone(A, B, C, D))

    hold = wanted(found, over)

    assert hold is not None
    assert hold.is_released
    assert wanted(found, hold) == hold


@pytest.mark.parametrize("over", [RELEASED, OVER], ids=["by an operator", "by its own end"])
def test_a_further_wave_is_held_for(over: HoldOrder) -> None:
    hold = wanted(census(TEN, {**all_gone(A, B, C, D, ago_s=50), **all_gone(E, F, G)}), over)

    assert hold is not None
    assert not hold.is_released
    assert hold.bookies == (E, F, G)
    assert hold.since_ms == NOW_MS


def test_a_further_loss_that_is_no_wave_is_not() -> None:
    hold = wanted(census(TEN, {**all_gone(A, B, C, D), E: 1}), RELEASED)

    assert hold == RELEASED


def test_bookies_that_came_back_are_held_for_again() -> None:
    back = wanted(census(TEN, all_gone(A)), RELEASED)
    assert back == replace(RELEASED, bookies=(A,))
    assert wanted(census(TEN, {}), back) is None

    again = wanted(census(TEN, {A: 900, **all_gone(B, C, D)}), back)

    assert again is not None
    assert not again.is_released
    assert again.bookies == (B, C, D)


def test_an_operators_hold_that_is_over_by_itself_says_nothing_of_bookies_still_away() -> None:
    over = HoldOrder(since_ms=1, until_ms=NOW_MS, is_by_operator=True)

    assert wanted(census(TEN, all_gone(A)), over) is None
    hold = wanted(census(TEN, all_gone(A, B, C, D)), over)
    assert hold is not None
    assert not hold.is_by_operator


# --- Who counts -----------------------------------------------------------------------------------


def test_who_is_away_on_purpose_or_for_good_does_not_count() -> None:
    view = ClusterView(
        bookies=BookieView(
            writable={
                b: RegisteredBookie(bookie_id=b, address=None, czxid=1, is_writable=True)
                for b in (E, F)
            },
            read_only={},
        ),
        cookies=dict.fromkeys(
            (A, B, C, E, F),
            Stat(version=0),
        ),
        orders=Orders(
            maintenance={A: MaintenanceWindow(since_ms=0, until_ms=1)},
            draining={B: DrainOrder(since_ms=0)},
        ),
    )

    found = BookieCensus.of(
        view,
        dict.fromkeys((A, B, C, D), 50.0),
        lost_since_s={C: 10.0, E: 20.0},
        rack_of=lambda _: DEFAULT_RACK,
    )

    assert found.present == {E, F}
    assert found.absent_since_s == {C: 10.0}, "A maintenance, B drained, D decommissioned"
    assert C in found.settled, (
        "an earlier leader marked its ledgers, and knew since when it is away"
    )


def test_without_any_cookie_every_bookie_that_is_away_counts() -> None:
    found = BookieCensus.of(
        ClusterView(bookies=BookieView()),
        {A: 50.0},
        lost_since_s={},
        rack_of=lambda _: DEFAULT_RACK,
    )

    assert found.absent_since_s == {A: 50.0}
