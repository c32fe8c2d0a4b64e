"""The reply times of a simulated bookie limit the requests in flight."""

import random
import statistics
from dataclasses import dataclass

import pytest

from ledgers.bulk.flow_control import ROUND_SAMPLES, TRIAL_INTERVAL_S, TRIAL_ROUNDS, ReplyTimes

CAP = 1_000


@dataclass(slots=True, kw_only=True)
class Queue:
    """A bookie that serves one request after the other: each reply waits for all before it."""

    base_s: float = 0.002
    """Time of a reply when nothing waits."""
    service_s: float = 20e-6
    others_in_flight: int = 0
    now_s: float = 0.0

    def latency_s(self, in_flight: int) -> float:
        return max(self.base_s, (in_flight + self.others_in_flight) * self.service_s)

    def run(self, times: ReplyTimes, duration_s: float, *, noise: random.Random) -> None:
        """Ask as much as is allowed, and note one reply time after the other."""
        end_s = self.now_s + duration_s
        while self.now_s < end_s:
            latency_s = self.latency_s(times.limit) * noise.uniform(0.8, 1.2)
            self.now_s += latency_s
            times.note_reply(latency_s, is_limiting=True, now_s=self.now_s)


@pytest.fixture(params=range(5), ids="seed {}".format)
def noise(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.param)


def test_a_bookie_that_keeps_up_is_used_up_to_the_bound(noise: random.Random) -> None:
    times = ReplyTimes(cap=64)

    Queue().run(times, 5.0, noise=noise)

    assert times.limit == 64


def test_a_new_writer_gets_most_of_a_full_bookie(noise: random.Random) -> None:
    bookie, times = Queue(), ReplyTimes(cap=CAP)
    bookie.run(times, 5.0, noise=noise)

    bookie.others_in_flight = 400
    bookie.run(times, 2.0, noise=noise)
    beside = times.limit
    bookie.others_in_flight = 0
    bookie.run(times, 5.0, noise=noise)

    assert beside < 60
    assert times.limit > 80


def test_it_adds_a_quarter_to_the_wait_of_a_steady_writer(noise: random.Random) -> None:
    bookie, times = Queue(others_in_flight=400), ReplyTimes(cap=CAP)

    limits = []
    for _ in range(500):
        bookie.run(times, 0.1, noise=noise)
        limits.append(times.limit)

    assert 20 <= statistics.median(limits) <= 400 * 0.75


def test_a_busy_answer_halves_the_limit_down_to_one_request() -> None:
    times = ReplyTimes(cap=64)
    before = times.limit

    times.note_busy()
    after_one = times.limit
    for _ in range(20):
        times.note_busy()

    assert after_one == before // 2
    assert times.limit == 1


def test_one_slow_reply_changes_nothing() -> None:
    times = ReplyTimes(cap=64)
    for n in range(TRIAL_ROUNDS * ROUND_SAMPLES):
        times.note_reply(0.002, is_limiting=False, now_s=n)
    before = times.limit

    for n in range(ROUND_SAMPLES):
        times.note_reply(1.0 if n == 0 else 0.002, is_limiting=False, now_s=n)

    assert times.limit == before


def test_an_unused_limit_does_not_grow() -> None:
    times = ReplyTimes(cap=64)
    for n in range(TRIAL_ROUNDS * ROUND_SAMPLES):
        times.note_reply(0.002, is_limiting=False, now_s=n * 0.001)
    before = times.limit

    for n in range(100):
        times.note_reply(0.002, is_limiting=False, now_s=n * 0.001)

    assert times.limit == before


def test_a_permanently_slower_bookie_is_not_starved(noise: random.Random) -> None:
    bookie, times = Queue(base_s=0.002), ReplyTimes(cap=64)
    bookie.run(times, 5.0, noise=noise)
    bookie.base_s = 0.040
    bookie.run(times, 5.0, noise=noise)
    at_first = times.limit

    bookie.run(times, 3 * TRIAL_INTERVAL_S, noise=noise)

    assert at_first < 16
    assert times.limit > 32


@pytest.mark.parametrize("cap", [1, 2, 500])
def test_it_never_leaves_its_bounds(cap: int, noise: random.Random) -> None:
    times = ReplyTimes(cap=cap)

    for n in range(5_000):
        times.note_reply(noise.expovariate(100), is_limiting=noise.random() < 0.5, now_s=n)
        if noise.random() < 0.01:
            times.note_busy()

        assert 1 <= times.limit <= cap
