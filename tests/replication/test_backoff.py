"""A ledger that could not be repaired is tried again after a backoff."""

import asyncio
import random
from dataclasses import replace

import pytest

from replication.backoff import JITTER, REMEMBERED_S, Deferral, retry_wait_s
from replication.ledger_record import ClusterFingerprint
from replication.reasons import Reason
from replication.settings import ReplicationSettings
from tests.replication.cluster import Cluster
from tests.replication.nodes import LEDGER

SEED = 20
SETTINGS = ReplicationSettings(retry_min_s=10, retry_max_s=300)
FINGERPRINT = ClusterFingerprint(newest_czxid=7, bookies="b", orders="o")
BETTER = replace(FINGERPRINT, newest_czxid=8)


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
        pytest.param(
            Reason.ACCESS_DENIED, [60, 120, 240, 480, 960, 1920, 3600], id="and for the first try"
        ),
        pytest.param(Reason.NO_ANSWER, [2, 4, 8, 16, 32, 60, 60], id="short"),
    ],
)
def test_the_wait_doubles_up_to_its_bound_with_jitter(
    reason: Reason | None, nominal_s: list[float]
) -> None:
    rng = random.Random(SEED)

    for tries, expected_s in enumerate(nominal_s, start=1):
        waits_s = [retry_wait_s(SETTINGS, reason, tries=tries, rng=rng) for _ in range(20)]
        assert all((1 - JITTER) * expected_s <= s <= (1 + JITTER) * expected_s for s in waits_s)
        assert len(set(waits_s)) > 1


def test_the_wait_is_bounded_for_any_number_of_tries() -> None:
    wait_s = retry_wait_s(SETTINGS, None, tries=10**6, rng=random.Random(SEED))

    assert wait_s <= 300 * (1 + JITTER)


def deferred(reason: Reason | None = Reason.NO_TARGET, *, tries: int = 3) -> Deferral:
    return Deferral(due_s=100.0, fingerprint=FINGERPRINT, reason=reason, tries=tries)


@pytest.mark.compat("G13", verdict="better")
@pytest.mark.parametrize(
    ("now_s", "fingerprint", "reason", "is_due"),
    [
        pytest.param(99.9, FINGERPRINT, Reason.NO_TARGET, False, id="too early"),
        pytest.param(100.0, FINGERPRINT, Reason.NO_TARGET, True, id="its time has come"),
        pytest.param(0.0, BETTER, Reason.NO_TARGET, True, id="a bookie came"),
        pytest.param(
            0.0, replace(FINGERPRINT, orders="p"), Reason.NO_TARGET, True, id="an order changed"
        ),
        pytest.param(
            0.0,
            replace(FINGERPRINT, bookies="c"),
            Reason.NO_TARGET,
            False,
            id="a bookie disappeared: no help",
        ),
        pytest.param(
            0.0,
            replace(FINGERPRINT, bookies="c"),
            Reason.NO_ANSWER,
            True,
            id="the unresponsive bookie, perhaps",
        ),
        pytest.param(
            0.0,
            replace(FINGERPRINT, newest_czxid=3, bookies="c"),
            Reason.NO_TARGET,
            False,
            id="the newest bookie disappeared",
        ),
    ],
)
def test_a_ledger_is_due_in_time_or_when_the_cluster_improves(
    now_s: float, fingerprint: ClusterFingerprint, reason: Reason, is_due: bool
) -> None:
    assert deferred(reason).is_due(now_s=now_s, fingerprint=fingerprint) is is_due


@pytest.mark.parametrize(
    ("reason", "fingerprint", "tries"),
    [
        pytest.param(Reason.NO_TARGET, FINGERPRINT, 3, id="alike"),
        pytest.param(Reason.NO_COPY, FINGERPRINT, 0, id="another reason starts the count again"),
        pytest.param(Reason.NO_TARGET, BETTER, 0, id="and so does an improved cluster"),
    ],
)
def test_tries_that_failed_for_the_same_reason_are_counted(
    reason: Reason, fingerprint: ClusterFingerprint, tries: int
) -> None:
    assert deferred().tries_for(reason, fingerprint=fingerprint) == tries


# --- The list of a worker -------------------------------------------------------------------------


@pytest.mark.compat(
    "G13",
    verdict="better",
    why="all nodes follow one note per ledger; success, a new bookie or a changed order resets "
    "the backoff",
)
async def test_success_resets_the_count(cluster: Cluster) -> None:
    async with cluster.node() as node:
        waiting = node.worker.waiting
        waiting.pause(LEDGER, 100.0)
        assert waiting.due([LEDGER], losses={LEDGER}) == []

        waiting.complete(LEDGER)

        assert waiting.due([LEDGER], losses={LEDGER}) == [LEDGER]
        assert LEDGER not in waiting._deferrals


@pytest.mark.parametrize(("after_s", "is_kept"), [(REMEMBERED_S - 1, True), (REMEMBERED_S, False)])
async def test_ledgers_due_long_ago_are_forgotten(after_s: float, is_kept: bool) -> None:
    cluster = await Cluster.start()
    async with cluster.node() as node:
        waiting = node.worker.waiting
        waiting.pause(LEDGER, 100.0)
        await asyncio.sleep(100.0 + after_s)

        waiting.due([], losses=())

        assert (LEDGER in waiting._deferrals) is is_kept
