"""An absent bookie is lost after the recovery delay: a function of times."""

from dataclasses import replace

import pytest

from auditor.absence import delay_left_s, still_absent
from auditor.records import UNSEEN_MAX_MS, StoredAbsences
from ledgers.model import BookieId

A, B, C = (BookieId(f"bookie-{name}:3181") for name in "abc")


@pytest.mark.parametrize(
    ("absent_s", "delay_s", "is_lost"),
    [
        pytest.param(0, 0, True, id="without a delay a bookie is lost at once"),
        pytest.param(59, 60, False, id="just inside the delay"),
        pytest.param(60, 60, True, id="the boundary itself counts"),
    ],
)
def test_absent_bookies_become_lost(absent_s: float, delay_s: float, is_lost: bool) -> None:
    left_s = delay_left_s({A: 1000.0}, now_s=1000.0 + absent_s, delay_s=delay_s)

    assert (A not in left_s) is is_lost


def test_each_bookie_has_its_own_delay() -> None:
    since_s = {A: 1000.0, B: 1050.0}

    assert delay_left_s(since_s, now_s=1070.0, delay_s=60) == {B: 40.0}


def test_no_delay_is_pending_if_all_absent_bookies_are_lost() -> None:
    assert delay_left_s({A: 1000.0}, now_s=2000.0, delay_s=60) == {}
    assert delay_left_s({}, now_s=2000.0, delay_s=60) == {}


def test_the_delay_starts_again_when_a_bookie_returns() -> None:
    since_s = still_absent({A: 1000.0}, known=[A, B], available=[A, B], now_s=1030.0)
    assert since_s == {}

    since_s = still_absent(since_s, known=[A, B], available=[B], now_s=1040.0)
    assert since_s == {A: 1040.0}


def test_the_first_absence_is_remembered_while_it_lasts() -> None:
    since_s = still_absent({A: 1000.0}, known=[A, B], available=[], now_s=1030.0)

    assert since_s == {A: 1000.0, B: 1030.0}


def test_an_unknown_bookie_is_forgotten() -> None:
    assert still_absent({C: 1000.0}, known=[A], available=[A], now_s=1030.0) == {}


def test_a_request_ends_the_delay_of_bookies_absent_then() -> None:
    """A bookie that disappears after the request still has its delay."""
    since_s = {A: 1000.0, B: 1050.0}

    assert delay_left_s(since_s, now_s=1060.0, delay_s=600, overruled_s=1020.0).keys() == {B}
    assert delay_left_s(since_s, now_s=1060.0, delay_s=600, overruled_s=1050.0) == {}


def test_maintenance_is_no_absence_and_the_delay_starts_after_it() -> None:
    since_s = still_absent({A: 1000.0}, known=[A], available=[], excused=[A], now_s=1010.0)
    assert since_s == {}

    since_s = still_absent(since_s, known=[A], available=[], now_s=1040.0)
    assert since_s == {A: 1040.0}


def test_a_delay_after_maintenance_starts_with_the_absence() -> None:
    since_s = still_absent({}, known=[A], available=[A], excused=[A], now_s=1000.0)
    since_s = still_absent(since_s, known=[A], available=[A], now_s=1010.0)
    since_s = still_absent(since_s, known=[A], available=[], now_s=1050.0)

    assert since_s == {A: 1050.0}


# --- From one leader to the next ------------------------------------------------------------------

WALL_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("seen_ms_ago", "wall_ms_later", "away_s"),
    [
        pytest.param(0, 0, 50, id="at once"),
        pytest.param(0, 20_000, 70, id="the time between two leaders counts"),
        pytest.param(
            0, UNSEEN_MAX_MS, 50 + UNSEEN_MAX_MS / 1000, id="as long as auditors may stop watching"
        ),
        pytest.param(0, UNSEEN_MAX_MS + 1, None, id="no auditor watched for too long"),
        pytest.param(UNSEEN_MAX_MS, 1, None, id="also while that leader led"),
        pytest.param(0, -20_000, 30, id="a clock that is behind by less"),
        pytest.param(0, -3_600_000, 0, id="a clock that is behind by far"),
    ],
)
def test_a_new_leader_continues_the_recorded_absences(
    seen_ms_ago: int, wall_ms_later: int, away_s: float | None
) -> None:
    stored = StoredAbsences.of({A: 950.0}, now_s=1000.0, wall_ms=WALL_MS)
    stored = replace(stored, seen_ms=WALL_MS - seen_ms_ago)

    resumed = stored.resumed(now_s=7.0, wall_ms=WALL_MS + wall_ms_later)

    assert resumed == ({} if away_s is None else {A: 7.0 - away_s})
