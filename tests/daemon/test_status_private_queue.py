"""``bookmender status`` and ``bookmender queue`` show bookmender's private queue."""

import pytest

from auditor.mark_reasons import Finding
from daemon.cli.queue import line_of
from daemon.operations.queue import queue_rows
from daemon.status.gathering import gather_status
from daemon.status.report import to_text
from ledgers.model import BookieId
from replication import znodes
from replication.marks import read_marks
from replication.nodes import Membership, Role
from replication.znodes import Mark
from tests.daemon.status_values import as_json, codes
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS, node_info

PRIVATE = PATHS.private


async def own_mark(*found_bad: BookieId) -> Cluster:
    """Return a cluster with ledger 5 in the private queue, damaged on these bookies or to drain."""
    cluster = await Cluster.start(B1, B2, B3)
    await Membership.join(cluster.store, PATHS, node_info("node-1", Role.AUDITOR))
    data = znodes.mark_to_bytes(Mark(replicas=found_bad or (B1,), ctime_ms=1))
    await cluster.store.create(PRIVATE.mark(5), data, with_parents=True)
    if found_bad:
        found = Finding(check="fsck", bookies=found_bad, detail="entry 3", found_ms=1)
        await cluster.store.create(PATHS.finding(5), found.to_json(), with_parents=True)
    return cluster


@in_virtual_time
async def test_damage_is_shown_apart_from_ledgers_to_move() -> None:
    cluster = await own_mark(B1)
    await Membership.join(cluster.store, PATHS, node_info("node-2", Role.WORKER))

    status = await gather_status(visiting(cluster), clock=cluster.clock)

    assert "LEDGERS_DAMAGED WARN" in codes(status)
    assert not any(code.startswith("NO_WORKERS") for code in codes(status))
    assert as_json(status)["queue"]["private_damaged"] == 1
    lines = to_text(status).splitlines()
    assert "queue     1 ledger queued, 0 locked for repair, 0 waiting" in lines
    assert "          1 in bookmender's private queue, damaged" in lines


@in_virtual_time
async def test_damage_without_a_worker_is_not_repaired() -> None:
    status = await gather_status(visiting(await own_mark(B1)))

    assert "NO_WORKERS ERROR" in codes(status)


@in_virtual_time
async def test_a_ledger_to_move_is_not_damaged() -> None:
    status = await gather_status(visiting(await own_mark()))

    assert codes(status) == ["NO_AUDITOR UNKNOWN", "NO_WORKERS INFO"]
    assert as_json(status)["queue"]["private_damaged"] == 0
    assert "1 in bookmender's private queue, to drain or repair by hand" in to_text(status)


@in_virtual_time
async def test_a_ledger_in_both_queues_counts_once() -> None:
    cluster = await own_mark(B1)
    await cluster.mark(B2, ledger_id=4)
    await cluster.mark(B1, ledger_id=5)
    await cluster.store.create(PRIVATE.mark(6), with_parents=True)

    status = await gather_status(visiting(cluster), clock=cluster.clock)

    queue = as_json(status)["queue"]
    assert (queue["total"], queue["marked"], queue["private"]) == (3, 2, 1)


@pytest.mark.parametrize(
    ("found_bad", "expected"),
    [
        pytest.param((B2,), f"ledger 5: bad copies on {B2} [", id="found by fsck"),
        pytest.param(
            (), f"ledger 5: check by hand on {B1} [", id="by hand, or from a cancelled drain"
        ),
    ],
)
def test_queue_list_says_why_a_ledger_is_queued(
    found_bad: tuple[BookieId, ...], expected: str
) -> None:
    @in_virtual_time
    async def tell() -> None:
        cluster = await own_mark(*found_bad)
        marks = await read_marks(cluster.store, PRIVATE, [5])

        [row] = await queue_rows(visiting(cluster), marks, only_private={5})

        assert line_of(row, now_ms=1_000).startswith(expected)

    tell()
