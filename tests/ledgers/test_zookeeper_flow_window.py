"""The number of requests in flight, for scripted latencies."""

import pytest

from ledgers.zookeeper.flow import (
    BEST_PERIOD_S,
    REQUESTS_FIRST,
    REQUESTS_MAX,
    REQUESTS_MIN,
    SLOW_MIN_S,
    SLOW_TIMES,
    RequestWindow,
)

QUICK_S = 0.02
SLOW_S = SLOW_TIMES * QUICK_S + 0.001
ROUND = 2 * REQUESTS_MAX
"""More answers than any round has."""


def keep_full(window: RequestWindow, latency_s: float, *, answers: int, now_s: float = 0.0) -> None:
    """Note answers of that latency, with as many requests in flight as the window allows."""
    for _ in range(answers):
        fill(window)
        window.answered(latency_s, now_s=now_s)


def fill(window: RequestWindow) -> None:
    while not window.is_full:
        window.sent()


def one_at_a_time(window: RequestWindow, latency_s: float, *, answers: int) -> None:
    for _ in range(answers):
        window.sent()
        window.answered(latency_s, now_s=0.0)


def test_one_slow_period_halves_it_once() -> None:
    """All that was in flight is late then, and must not count again."""
    window = RequestWindow()
    keep_full(window, QUICK_S, answers=1)
    fill(window)

    for _ in range(REQUESTS_FIRST):  # a round, and more were sent meanwhile
        window.answered(SLOW_S, now_s=0.0)
        fill(window)
    shrunk = window.size
    for _ in range(window.in_flight):
        window.answered(SLOW_S, now_s=0.0)

    assert shrunk == window.size == REQUESTS_FIRST // 2


def test_a_few_late_answers_neither_shrink_it_nor_let_it_grow() -> None:
    window = RequestWindow()
    keep_full(window, QUICK_S, answers=1)
    for _ in range(100):
        keep_full(window, SLOW_S, answers=1)
        keep_full(window, QUICK_S, answers=7)

    assert window.size == REQUESTS_FIRST


@pytest.mark.parametrize(
    ("best_s", "latency_s", "is_slow"),
    [
        pytest.param(0.0002, SLOW_MIN_S - 0.001, False, id="a few milliseconds do no harm"),
        pytest.param(0.0002, SLOW_MIN_S + 0.001, True, id="many times the best, and much"),
        pytest.param(0.1, 0.1 * SLOW_TIMES - 0.01, False, id="distant is not slow"),
        pytest.param(0.1, 0.1 * SLOW_TIMES + 0.01, True, id="distant and slow"),
    ],
)
def test_slow_is_far_above_the_best(best_s: float, latency_s: float, is_slow: bool) -> None:
    window = RequestWindow()
    one_at_a_time(window, best_s, answers=1)

    one_at_a_time(window, latency_s, answers=ROUND)

    assert (window.size < REQUESTS_FIRST) is is_slow


def test_the_best_latency_is_forgotten_after_a_while() -> None:
    """Else one quick hour would hold it down for good after a move to servers farther away."""
    window = RequestWindow()
    keep_full(window, QUICK_S, answers=ROUND)
    keep_full(window, SLOW_S, answers=10 * ROUND)
    assert window.size == REQUESTS_MIN

    for period in (1, 2):
        keep_full(window, SLOW_S, answers=100 * ROUND, now_s=period * BEST_PERIOD_S)

    assert window.size == REQUESTS_MAX
