"""Due times of periodic checks: a function of times."""

from math import inf

import pytest

from auditor.checks.runner import FORCED_MS, CheckState, due_in_s
from tests.auditor.checking import CountingCheck

HOUR_S = 3_600.0
HOUR_MS = 3_600_000
NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("last_ms", "interval_s", "expected_s"),
    [
        pytest.param(None, HOUR_S, -inf, id="never run: now"),
        pytest.param(NOW_MS, HOUR_S, HOUR_S, id="just run: after the interval"),
        pytest.param(NOW_MS - HOUR_MS + 1_000, HOUR_S, 1.0, id="nearly an interval ago"),
        pytest.param(NOW_MS - HOUR_MS, HOUR_S, 0.0, id="the interval itself counts"),
        pytest.param(NOW_MS - 3 * HOUR_MS, HOUR_S, -2 * HOUR_S, id="long overdue"),
        pytest.param(NOW_MS + 9 * HOUR_MS, HOUR_S, HOUR_S, id="the clock was set back: as of now"),
        pytest.param(None, 0, None, id="switched off"),
        pytest.param(NOW_MS - 3 * HOUR_MS, 0, None, id="switched off, and run long ago"),
        pytest.param(FORCED_MS, HOUR_S, -inf, id="asked for"),
        pytest.param(FORCED_MS, 0, -inf, id="asked for, although switched off"),
    ],
)
def test_a_check_is_due_an_interval_after_its_last_run(
    last_ms: int | None, interval_s: float, expected_s: float | None
) -> None:
    assert due_in_s(last_ms, interval_s=interval_s, now_ms=NOW_MS) == expected_s


@pytest.mark.parametrize(
    ("before_ms", "last_ms", "expected"),
    [
        pytest.param(NOW_MS, NOW_MS - 21 * 24 * HOUR_MS, True, id="as forceauditchecks does"),
        pytest.param(NOW_MS, None, True, id="deleted"),
        pytest.param(NOW_MS, NOW_MS + 1, False, id="another leader has run it"),
        pytest.param(None, NOW_MS, False, id="run for the first time"),
    ],
)
@pytest.mark.parametrize("interval_s", [HOUR_S, 1_000 * HOUR_S, 0])
def test_an_earlier_time_of_the_last_run_requests_the_check_of_any_interval(
    before_ms: int | None, last_ms: int | None, expected: bool, interval_s: float
) -> None:
    state = CheckState(check=CountingCheck())
    note(state, before_ms, interval_s=interval_s)

    note(state, last_ms, interval_s=interval_s)

    assert (state.due_s == -inf) is expected


def note(
    state: CheckState,
    last_ms: int | None,
    *,
    now_s: float = 100.0,
    now_ms: int = NOW_MS,
    interval_s: float = HOUR_S,
    is_unfinished: bool = False,
) -> None:
    state.update(
        last_ms, interval_s=interval_s, now_s=now_s, now_ms=now_ms, is_unfinished=is_unfinished
    )


def test_a_clock_set_back_later_delays_nothing() -> None:
    state = CheckState(check=CountingCheck())
    note(state, NOW_MS)

    note(state, NOW_MS, now_s=200.0, now_ms=NOW_MS - 1_000 * HOUR_MS)

    assert state.due_s == 100.0 + HOUR_S


@pytest.mark.parametrize(
    ("interval_s", "expected_s"),
    [
        pytest.param(HOUR_S, -inf, id="the run continues at once"),
        pytest.param(0, None, id="unless it was switched off since"),
    ],
)
def test_an_earlier_leaders_unfinished_run_is_continued(
    interval_s: float, expected_s: float | None
) -> None:
    state = CheckState(check=CountingCheck())

    note(state, NOW_MS, interval_s=interval_s, is_unfinished=True)

    assert state.due_s == expected_s
