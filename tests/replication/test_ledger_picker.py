"""Shares of the workers, and the order of ledgers: pure functions."""

import random
from collections import Counter

import pytest

from ledgers.model import BookieId
from replication.marks import MarkedLedger
from replication.work_queue import QueuedLedger
from replication.worker import (
    BUSY_LOOKS_PER_S,
    HELP_MAX,
    IDLE_LOOKS_PER_S,
    HashRing,
    PollBackoff,
    fewest_copies_first,
    others_to_read,
    own_to_read,
)
from replication.znodes import Mark
from tests.replication.ledger_values import B1, B2, B3

SEED = 3
WORKERS = [1 << 40 | number for number in range(20)]


def rng() -> random.Random:
    return random.Random(SEED)


# --- Shares of workers ----------------------------------------------------------------------------


def owners(workers: list[int], ledger_ids: range) -> dict[int, int]:
    shares = {worker: HashRing(workers, own=worker) for worker in workers}
    found = {i: [w for w in workers if shares[w].is_own(i)] for i in ledger_ids}
    assert all(len(of) == 1 for of in found.values()), "each ledger falls to one worker"
    return {ledger_id: of[0] for ledger_id, of in found.items()}


@pytest.mark.parametrize(
    "ledger_ids",
    [
        pytest.param(range(10_000), id="one after the other"),
        pytest.param(range(0, 10_000 << 32, 1 << 32), id="far apart"),
    ],
)
def test_every_worker_has_about_its_share(ledger_ids: range) -> None:
    counts = Counter(owners(WORKERS, ledger_ids).values())

    fair = len(ledger_ids) / len(WORKERS)
    assert len(counts) == len(WORKERS)
    assert all(0.6 * fair < count < 1.6 * fair for count in counts.values()), counts


def test_when_a_worker_stops_only_its_ledgers_change_owner() -> None:
    before = owners(WORKERS, range(2_000))

    after = owners(WORKERS[1:], range(2_000))

    moved = {ledger_id for ledger_id, owner in after.items() if owner != before[ledger_id]}
    assert moved == {ledger_id for ledger_id, owner in before.items() if owner == WORKERS[0]}


def test_a_worker_alone_or_not_yet_listed_has_a_share() -> None:
    assert all(map(HashRing((), own=7).is_own, range(100)))
    assert any(map(HashRing(WORKERS, own=7).is_own, range(1_000)))


# --- Reads ----------------------------------------------------------------------------------------


def test_of_our_own_ledgers_urgent_ones_are_read_first() -> None:
    """Others follow up to the limit."""
    chosen = own_to_read(range(100), [70, 200, 30], limit=10, rng=rng())

    assert chosen[:2] == [70, 30]
    assert len(set(chosen)) == 10
    assert set(chosen) <= set(range(100))


@pytest.mark.parametrize("limit", [0, 1])
def test_the_limit_applies_to_urgent_ledgers_too(limit: int) -> None:
    assert own_to_read(range(5), [4, 3], limit=limit, rng=rng()) == [4, 3][:limit]


@pytest.mark.parametrize(
    ("left_by_owner", "worker_count", "others_max", "count"),
    [
        pytest.param(10, 4, 100, 3, id="a share of them, rounded up"),
        pytest.param(10, 4, 2, 2, id="no more than the limit leaves"),
        pytest.param(10, 4, 0, 0, id="none without others_max"),
        pytest.param(10, 4, -5, 0, id="none if our own ledgers fill it"),
        pytest.param(1000, 2, 1000, HELP_MAX, id="never more than fit into one transaction"),
        pytest.param(0, 4, 100, 0, id="none if no ledgers are left"),
    ],
)
def test_ledgers_of_other_workers_are_read_within_bounds(
    left_by_owner: int, worker_count: int, others_max: int, count: int
) -> None:
    chosen = others_to_read(
        range(left_by_owner), [], worker_count=worker_count, others_max=others_max, rng=rng()
    )

    assert len(chosen) == count


def test_ledgers_that_lost_copies_are_read_before_others() -> None:
    chosen = own_to_read(range(100), [70], losses={5, 20, 30}, limit=10, rng=rng())

    assert chosen[0] == 70
    assert set(chosen[1:4]) == {5, 20, 30}
    assert len(set(chosen)) == 10


def due(
    ledger_id: int, *replicas: BookieId, ctime_ms: int | None = 5, is_loss: bool = True
) -> QueuedLedger:
    mark = MarkedLedger(ledger_id=ledger_id, mark=Mark(replicas=replicas, ctime_ms=ctime_ms))
    return QueuedLedger(ledger_id=ledger_id, marks=(mark,), is_loss=is_loss)


@pytest.mark.parametrize(
    ("found", "urgent", "order"),
    [
        pytest.param([due(1, B1), due(2, B1, B2), due(3)], [], [2, 1, 3], id="most missing"),
        pytest.param(
            [due(1, B1, B1, B1), due(2, B1, B2)], [], [2, 1], id="each bookie counts once"
        ),
        pytest.param([due(1, B1, ctime_ms=5), due(2, B1, ctime_ms=4)], [], [2, 1], id="the oldest"),
        pytest.param(
            [due(1, B1, ctime_ms=5), due(2, B1, ctime_ms=None)],
            [],
            [2, 1],
            id="without a time it counts as old",
        ),
        pytest.param(
            [due(1, B1, B2, B3), due(2, B1), due(3, B1)],
            [3, 9, 2],
            [3, 2, 1],
            id="the leader's urgent ledgers, in its order",
        ),
        pytest.param(
            [due(100, B1, ctime_ms=1), due(1, B1, ctime_ms=2)],
            [],
            [1, 100],
            id="among equals our own",
        ),
        pytest.param([due(1, B1), due(100, B1, B2)], [], [100, 1], id="danger before ownership"),
        pytest.param(
            [due(1, B1, B2, ctime_ms=1, is_loss=False), due(2, B1)],
            [1],
            [2, 1],
            id="losses before all else",
        ),
    ],
)
def test_ledgers_with_the_fewest_copies_come_first(
    found: list[QueuedLedger], urgent: list[int], order: list[int]
) -> None:
    ordered = fewest_copies_first(found, urgent, is_own=lambda ledger_id: ledger_id < 100)

    assert [each.ledger_id for each in ordered] == order


def test_two_marks_of_a_ledger_add_up_and_the_older_time_counts() -> None:
    marks = [
        MarkedLedger(ledger_id=1, mark=Mark(replicas=replicas, ctime_ms=ctime_ms), path=path)
        for path, replicas, ctime_ms in (("/shared", (B1, B2), 9), ("/own", (B2, B3), 4))
    ]
    queued = QueuedLedger(ledger_id=1, marks=tuple(marks))

    assert queued.replicas == {B1, B2, B3}
    assert queued.since_ms == 4


# --- Waits of an idle worker between two polls of the queue ---------------------------------------


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
