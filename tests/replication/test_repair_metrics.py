"""The metrics of repairs: tries by outcome, ledgers and payload that were copied, failures."""

import pytest

from ledgers.bookies import Answer
from replication.copying import REPAIRED_PAYLOAD_BYTES
from tests.metric_changes import changes
from tests.replication.cluster import (
    PAYLOAD_BYTES,
    queue_empty,
    until,
    with_lost_b2,
)
from tests.replication.copies import cluster_with_ledger, copy, job
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, working

TRIES = ("repair_seconds_count", "outcome", "done", "waiting", "marked-again", "interrupted")
COPIED = ("copied_ledgers_total", "cause", "loss", "placement")
FAILURES = ("copy_failures_total", "kind", "absent", "mismatch", "unreadable", "unknown", "target")


async def test_tries_and_copies_of_ledgers_are_counted() -> None:
    cluster = await with_lost_b2(4)
    tries, copied = changes(*TRIES), changes(*COPIED)
    payload_bytes = REPAIRED_PAYLOAD_BYTES._value.get()

    async with cluster.node() as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))

    assert tries() == {"done": 4}
    assert copied() == {"loss": 4}
    assert REPAIRED_PAYLOAD_BYTES._value.get() - payload_bytes == 4 * 7 * PAYLOAD_BYTES


async def test_a_ledger_that_needs_no_copy_is_not_counted_as_copied() -> None:
    cluster = await with_lost_b2(1)
    await cluster.revive(B2)
    tries, copied = changes(*TRIES), changes(*COPIED)

    async with cluster.node() as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))

    assert tries() == {"done": 1}
    assert copied() == {}


async def test_a_blocked_repair_is_a_try_that_waits() -> None:
    cluster = await with_lost_b2(1, B1, B2, B3)
    tries, copied = changes(*TRIES), changes(*COPIED)

    async def has_been_tried() -> bool:
        return bool(tries())

    async with cluster.node() as node, working(node):
        await until(cluster, has_been_tried)

    assert tries() == {"waiting": 1}
    assert copied() == {}


@pytest.mark.parametrize("damage", ["lose", "corrupt"])
async def test_reads_that_a_source_fails_are_counted_by_answer(damage: str) -> None:
    cluster = await cluster_with_ledger(write_quorum=3)
    for bookie in (B1, B2):
        getattr(cluster.bookie(bookie), damage)(LEDGER, 4)
    failures = changes(*FAILURES)

    outcome = await copy(cluster, job(write_quorum=3))

    answer = Answer.ABSENT if damage == "lose" else Answer.MISMATCH
    assert outcome.without_copy == (4,)
    assert failures() == {answer.value: 2}
