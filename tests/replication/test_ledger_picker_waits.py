"""Waits of an idle worker between two polls of the queue: alone, and among many workers."""

import pytest

from replication.worker import BUSY_LOOKS_PER_S, IDLE_LOOKS_PER_S, PollBackoff


def waits_s(*, worker_count: int, count: int = 10) -> list[float]:
    waits = PollBackoff(2.0)
    return [next_s(waits, worker_count=worker_count) for _ in range(count)]


def next_s(waits: PollBackoff, *, worker_count: int, is_queue_empty: bool = False) -> float:
    return waits.next_s(worker_count=worker_count, is_queue_empty=is_queue_empty)


def test_each_wait_is_twice_the_last_up_to_the_setting() -> None:
    assert waits_s(worker_count=1, count=8) == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


@pytest.mark.parametrize("worker_count", [11, 40, 100, 400, 1_000])
def test_all_workers_together_look_no_more_often(worker_count: int) -> None:
    first_s, *_, last_s = waits_s(worker_count=worker_count)

    assert worker_count / first_s == pytest.approx(BUSY_LOOKS_PER_S)
    assert worker_count / last_s <= IDLE_LOOKS_PER_S


def test_waits_are_short_again_after_an_event() -> None:
    waits = PollBackoff(2.0)
    for _ in range(10):
        next_s(waits, worker_count=1)

    waits.reset()

    assert next_s(waits, worker_count=1) == 0.05


@pytest.mark.parametrize(("worker_count", "longest_s"), [(1, 10.0), (100, 25.0)])
def test_an_empty_queue_is_read_less_often(worker_count: int, longest_s: float) -> None:
    waits = PollBackoff(2.0)
    for _ in range(20):
        next_s(waits, worker_count=worker_count, is_queue_empty=True)

    assert next_s(waits, worker_count=worker_count, is_queue_empty=True) == longest_s
    assert next_s(waits, worker_count=worker_count) == longest_s / 5


def test_a_longer_setting_is_obeyed_among_many_workers() -> None:
    waits = PollBackoff(600.0)
    for _ in range(20):
        next_s(waits, worker_count=400)

    assert next_s(waits, worker_count=400) == 600
