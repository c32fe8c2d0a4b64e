"""What ``bookmender status`` says of damage that stands in our private queue, as Java's workers do not
see it."""

import pytest

from auditor.findings import Finding
from daemon.cli.queue import line_of, queue_rows
from daemon.status.command import render
from daemon.status.gathering import gather_status
from ledgers.model import BookieId
from replication import znodes
from replication.marks import read_marks
from replication.nodes import Membership, Role
from replication.znodes import Mark
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS, node_info

OWN = PATHS.private


async def own_mark(*found_bad: BookieId) -> Cluster:
    """Of ledger 5, which a check found bad on these; without any it is of a drain."""
    cluster = await Cluster.start(B1, B2, B3)
    await Membership.join(cluster.store, PATHS, node_info("node-1", Role.AUDITOR))
    data = znodes.mark_to_bytes(Mark(replicas=found_bad or (B1,), ctime_ms=1))
    await cluster.store.create(OWN.mark(5), data, with_parents=True)
    if found_bad:
        found = Finding(check="fsck", bookies=found_bad, detail="entry 3", found_ms=1)
        await cluster.store.create(PATHS.finding(5), found.to_json(), with_parents=True)
    return cluster


@in_virtual_time
async def test_it_is_worked_on_by_a_worker_of_ours() -> None:
    cluster = await own_mark(B1)
    await Membership.join(cluster.store, PATHS, node_info("node-2", Role.WORKER))

    status = await gather_status(visiting(cluster), clock=cluster.clock)

    assert status.verdict == "repairing"
    assert status.to_json()["queue"]["own_damaged"] == 1
    lines = render(status, now_ms=0).splitlines()
    assert lines[-3:-1] == [
        "queue     1 ledger marked, 0 locked for repair, 0 waiting",
        "          1 of them in our private queue, with damage that Java's workers do not see",
    ]


@in_virtual_time
async def test_without_one_nobody_attends_to_it() -> None:
    cluster = await own_mark(B1)

    status = await gather_status(visiting(cluster), clock=cluster.clock)

    assert status.verdict == "unattended"
    assert "only a bookmender daemon mends it, and none is running" in render(status, now_ms=0)


@in_virtual_time
async def test_what_is_but_to_be_moved_is_no_damage() -> None:
    cluster = await own_mark()

    status = await gather_status(visiting(cluster), clock=cluster.clock)

    assert status.verdict not in ("repairing", "unattended")
    assert status.to_json()["queue"]["own_damaged"] == 0
    text = render(status, now_ms=0)
    assert "1 of them in our private queue, to be drained or repaired by hand" in text


@in_virtual_time
async def test_both_queues_are_one_total_and_what_stands_in_both_counts_once() -> None:
    cluster = await own_mark(B1)
    await cluster.mark(B2, ledger_id=4)
    await cluster.mark(B1, ledger_id=5)
    await cluster.store.create(OWN.mark(6), with_parents=True)

    status = await gather_status(visiting(cluster), clock=cluster.clock)

    queue = status.to_json()["queue"]
    assert (queue["total"], queue["marked"], queue["own_marked"]) == (3, 2, 1)
    assert "queue     3 ledgers marked" in render(status, now_ms=0)


@pytest.mark.parametrize(
    ("found_bad", "expected"),
    [
        pytest.param((B2,), f"ledger 5: bad copies on {B2} [", id="found by fsck"),
        pytest.param(
            (), f"ledger 5: to be checked on {B1} [", id="by hand, or of a drain that was"
        ),
    ],
)
def test_the_queue_says_what_is_asked_for(found_bad: tuple[BookieId, ...], expected: str) -> None:
    @in_virtual_time
    async def tell() -> None:
        cluster = await own_mark(*found_bad)
        marks = await read_marks(cluster.store, OWN, [5])

        [row] = await queue_rows(visiting(cluster), marks, own={5})

        assert line_of(row, now_ms=1_000).startswith(expected)

    tell()
