"""The bound on requests per second, at given times."""

import pytest

from ledgers.zookeeper.flow import BURST_S, RequestRate


def went_in(pace: RequestRate, duration_s: float, *, start_s: float = 1_000.0) -> int:
    """Return how many requests are admitted within that time if a caller is always waiting."""
    now_s, count = start_s, 0
    while now_s < start_s + duration_s:
        wait_s = pace.wait_s(now_s)
        if wait_s == 0:
            pace.took(now_s)
            count += 1
        else:
            now_s += wait_s + 1e-9
    return count


@pytest.mark.parametrize("per_s", [1, 7, 100, 5_000])
def test_the_rate_and_the_burst_bound_a_second(per_s: int) -> None:
    assert went_in(RequestRate(per_s), 10.0) == pytest.approx(10 * per_s + per_s * BURST_S, abs=1)


def test_zero_is_no_limit() -> None:
    pace = RequestRate(0)
    for _ in range(10_000):
        assert pace.wait_s(0.0) == 0
        pace.took(0.0)


def test_unused_rate_is_not_saved_for_long() -> None:
    pace = RequestRate(100)
    went_in(pace, 1.0)

    assert went_in(pace, 0.001, start_s=5_000.0) == pytest.approx(100 * BURST_S, abs=1)


def test_a_change_takes_effect_at_once() -> None:
    pace = RequestRate(1)
    pace.took(0.0)
    pace.took(0.0)
    assert pace.wait_s(0.0) > 1

    pace.per_s = 100

    assert went_in(pace, 1.0, start_s=0.0) == pytest.approx(100 + 100 * BURST_S, abs=1)


def test_setting_the_same_rate_again_changes_nothing() -> None:
    pace = RequestRate(1)
    pace.took(0.0)
    pace.took(0.0)
    waits_s = pace.wait_s(0.0)

    pace.per_s = 1

    assert pace.wait_s(0.0) == waits_s > 0
