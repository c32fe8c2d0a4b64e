import random

import pytest

from replication.deferrals import Deferrals

SEED = 20
LEDGER = 5


@pytest.fixture
def deferrals() -> Deferrals:
    return Deferrals(wait_min_s=10, wait_max_s=300, rng=random.Random(SEED))


def test_the_wait_doubles_up_to_its_bound_with_jitter(deferrals: Deferrals) -> None:
    waits_s = [deferrals.defer(LEDGER, now_s=1000.0) for _ in range(8)]

    for wait_s, nominal_s in zip(waits_s, [10, 20, 40, 80, 160, 300, 300, 300], strict=True):
        assert 0.8 * nominal_s <= wait_s <= 1.2 * nominal_s


def test_a_deferred_ledger_is_left_alone_until_it_is_due(deferrals: Deferrals) -> None:
    wait_s = deferrals.defer(LEDGER, now_s=1000.0)

    assert deferrals.not_due(now_s=1000.0 + wait_s - 0.1) == {LEDGER}
    assert deferrals.not_due(now_s=1000.0 + wait_s) == set()


@pytest.mark.compat("G13", verdict="better")
def test_a_change_of_circumstances_makes_everything_due_and_the_waits_short_again(
    deferrals: Deferrals,
) -> None:
    for _ in range(5):
        deferrals.defer(LEDGER, now_s=1000.0)

    deferrals.hasten()

    assert deferrals.not_due(now_s=1000.0) == set()
    assert 0.8 * 10 <= deferrals.defer(LEDGER, now_s=1000.0) <= 1.2 * 10


@pytest.mark.compat(
    "G13",
    verdict="better",
    why="success and a change of the bookies begin them anew",
)
def test_success_begins_the_waits_anew(deferrals: Deferrals) -> None:
    deferrals.defer(LEDGER, now_s=1000.0)

    deferrals.forget(LEDGER)

    assert deferrals.not_due(now_s=1000.0) == set()
    assert deferrals.defer(LEDGER, now_s=1000.0) <= 1.2 * 10
