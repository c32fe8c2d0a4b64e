"""When a ledger that could not be repaired is tried again."""

import random
from dataclasses import replace

import pytest

from replication.backoff import JITTER, REMEMBERED_S, Deferrals, RetryPace
from replication.ledger_record import ClusterFingerprint
from replication.reasons import Reason

SEED = 20
LEDGER = 5
PACE = RetryPace(wait_min_s=10, wait_max_s=300)
WORLD = ClusterFingerprint(newest_czxid=7, bookies="b", orders="o")
BETTER = replace(WORLD, newest_czxid=8)


@pytest.mark.compat(
    "TestReplicationWorker.testDeferLedgerLockReleaseForReplicationWorker",
    verdict="other",
)
@pytest.mark.parametrize(
    ("reason", "nominal_s"),
    [
        pytest.param(Reason.NO_TARGET, [10, 20, 40, 80, 160, 300, 300], id="as set"),
        pytest.param(None, [10, 20, 40, 80, 160, 300, 300], id="unknown: as set"),
        pytest.param(Reason.NO_COPY, [60, 120, 240, 480, 960, 1920, 3600], id="long"),
        pytest.param(Reason.CORRUPT_METADATA, [60, 120, 240, 480, 960, 1920, 3600], id="long, too"),
        pytest.param(Reason.ACCESS_DENIED, [60, 120, 240, 480, 960, 1920, 3600], id="likewise"),
        pytest.param(Reason.NO_ANSWER, [2, 4, 8, 16, 32, 60, 60], id="short"),
    ],
)
def test_the_wait_doubles_up_to_its_bound_with_jitter(
    reason: Reason | None, nominal_s: list[float]
) -> None:
    rng = random.Random(SEED)

    for tries, expected_s in enumerate(nominal_s, start=1):
        waits_s = [PACE.wait_s(reason, tries=tries, rng=rng) for _ in range(20)]
        assert all((1 - JITTER) * expected_s <= s <= (1 + JITTER) * expected_s for s in waits_s)
        assert len(set(waits_s)) > 1


def test_however_many_tries_the_wait_is_bounded() -> None:
    assert PACE.wait_s(None, tries=10**6, rng=random.Random(SEED)) <= 300 * (1 + JITTER)


def deferred(reason: Reason | None = Reason.NO_TARGET, *, tries: int = 3) -> Deferrals:
    deferrals = Deferrals()
    deferrals.defer(LEDGER, due_s=100.0, fingerprint=WORLD, reason=reason, tries=tries)
    return deferrals


@pytest.mark.compat("G13", verdict="better")
@pytest.mark.parametrize(
    ("now_s", "fingerprint", "reason", "is_due"),
    [
        pytest.param(99.9, WORLD, Reason.NO_TARGET, False, id="too early"),
        pytest.param(100.0, WORLD, Reason.NO_TARGET, True, id="its time has come"),
        pytest.param(0.0, BETTER, Reason.NO_TARGET, True, id="a bookie came"),
        pytest.param(
            0.0, replace(WORLD, orders="p"), Reason.NO_TARGET, True, id="an order changed"
        ),
        pytest.param(
            0.0, replace(WORLD, bookies="c"), Reason.NO_TARGET, False, id="a bookie went: no help"
        ),
        pytest.param(
            0.0, replace(WORLD, bookies="c"), Reason.NO_ANSWER, True, id="the silent one, perhaps"
        ),
        pytest.param(
            0.0,
            replace(WORLD, newest_czxid=3, bookies="c"),
            Reason.NO_TARGET,
            False,
            id="the newest went",
        ),
    ],
)
def test_a_ledger_is_due_in_time_or_in_a_better_world(
    now_s: float, fingerprint: ClusterFingerprint, reason: Reason, is_due: bool
) -> None:
    assert deferred(reason).is_due(LEDGER, now_s=now_s, fingerprint=fingerprint) is is_due


def test_a_ledger_that_was_never_put_aside_is_due() -> None:
    assert Deferrals().is_due(LEDGER, now_s=0.0, fingerprint=WORLD)


@pytest.mark.parametrize(
    ("reason", "fingerprint", "tries"),
    [
        pytest.param(Reason.NO_TARGET, WORLD, 3, id="alike"),
        pytest.param(Reason.NO_COPY, WORLD, 0, id="another reason begins anew"),
        pytest.param(Reason.NO_TARGET, BETTER, 0, id="and so does a better world"),
    ],
)
def test_tries_that_failed_alike_are_counted(
    reason: Reason, fingerprint: ClusterFingerprint, tries: int
) -> None:
    assert deferred().tries(LEDGER, reason, fingerprint=fingerprint) == tries


@pytest.mark.compat(
    "G13",
    verdict="better",
    why="all nodes follow one note per ledger; success, a new bookie or a changed order resets the backoff",
)
def test_success_begins_anew() -> None:
    deferrals = deferred()

    deferrals.forget(LEDGER)

    assert deferrals.is_due(LEDGER, now_s=0.0, fingerprint=WORLD)
    assert deferrals.tries(LEDGER, Reason.NO_TARGET, fingerprint=WORLD) == 0


@pytest.mark.parametrize(("after_s", "tries"), [(REMEMBERED_S - 1, 3), (REMEMBERED_S, 0)])
def test_what_was_due_long_ago_is_forgotten(after_s: float, tries: int) -> None:
    deferrals = deferred()

    deferrals.prune(now_s=100.0 + after_s)

    assert deferrals.tries(LEDGER, Reason.NO_TARGET, fingerprint=WORLD) == tries
