"""Limits at bookies with active, inactive or unknown clients, and those by reply times."""

import random
import statistics
from dataclasses import dataclass

import pytest

from ledgers.bulk.flow_control import (
    ROUND_SAMPLES,
    SHARED_ADDS_PER_S,
    SHARED_BYTES_PER_S,
    SHARED_SINGLE_READS_PER_S,
    TRIAL_INTERVAL_S,
    TRIAL_ROUNDS,
    Activity,
    ActivityOf,
    FlowControl,
    ReplyTimes,
    flow_limits,
)
from ledgers.model import BookieId
from tests.replication.cluster import in_virtual_time

A, B = BookieId("a:3181"), BookieId("b:3181")


def everywhere(activity: Activity) -> ActivityOf:
    return lambda bookie: activity


# --- The decision ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sharer_count", [1, 100])
def test_without_an_active_client_there_is_no_rate_limit(sharer_count: int) -> None:
    limits = flow_limits(Activity.QUIET, yields=True, sharer_count=sharer_count)

    assert limits.is_full_speed
    assert (limits.reads_per_s, limits.single_reads_per_s, limits.adds_per_s) == (0, 0, 0)
    assert not limits.is_by_reply_times


@pytest.mark.parametrize("activity", Activity)
def test_without_priority_of_clients_nothing_is_limited(activity: Activity) -> None:
    assert flow_limits(activity, yields=False, sharer_count=3).is_full_speed


@pytest.mark.parametrize("activity", [Activity.ACTIVE, Activity.UNKNOWN])
def test_nodes_share_the_rate_where_clients_may_be_active(activity: Activity) -> None:
    limits = flow_limits(activity, yields=True, sharer_count=10)

    assert limits.adds_per_s == SHARED_ADDS_PER_S // 10
    assert limits.single_reads_per_s == SHARED_SINGLE_READS_PER_S // 10
    assert limits.bytes_per_s == SHARED_BYTES_PER_S // 10
    assert limits.is_by_reply_times


def test_no_number_of_nodes_makes_a_rate_of_zero() -> None:
    """It would mean no limit."""
    assert flow_limits(Activity.ACTIVE, yields=True, sharer_count=10**9).adds_per_s == 1


@in_virtual_time
async def test_a_bookie_without_a_recent_record_is_unknown() -> None:
    flow = FlowControl()
    assert flow.of(A).limits == flow_limits(Activity.UNKNOWN, yields=True, sharer_count=1)

    flow.set_activity(
        lambda bookie: Activity.QUIET if bookie == A else Activity.ACTIVE, sharer_count=2
    )
    assert flow.of(A).limits.is_full_speed
    assert not flow.of(B).limits.is_full_speed
    assert flow.is_yielding

    flow.set_activity(None, sharer_count=2)
    assert flow.of(A).limits == flow_limits(Activity.UNKNOWN, yields=True, sharer_count=2)
    flow.close()


@in_virtual_time
async def test_users_are_told_when_limits_change_and_only_then() -> None:
    flow, told = FlowControl(), []
    flow.of(A).listeners.append(lambda: told.append(flow.of(A).limits))

    flow.set_activity(everywhere(Activity.ACTIVE), sharer_count=1)  # as good as unknown
    assert told == []
    flow.yields = False

    assert told == [flow_limits(Activity.ACTIVE, yields=False, sharer_count=1)]
    flow.close()


# --- Reply times limit the requests in flight -----------------------------------------------------


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
