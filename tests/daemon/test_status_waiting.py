"""What ``bookmender status`` says of the ledgers that wait."""

from dataclasses import replace

import pytest

from daemon.messages import message
from daemon.status.command import render
from daemon.status.gathering import gather_status
from replication.reasons import Reason
from tests.daemon.status_values import WHOLE, note
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time, queue_empty, until
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import working


@pytest.mark.parametrize(
    ("until_ms", "text"),
    [
        pytest.param(20_000, "next try in 20 s, when its grace is over", id="it goes on"),
        pytest.param(-1_000, "next try due", id="its node is about to go on"),
    ],
)
def test_what_failed_is_tried_again_after_a_grace(until_ms: int, text: str) -> None:
    waiting = replace(note(7, Reason.NO_COVERAGE), grace_until_ms=until_ms)
    status = replace(WHOLE, marked_count=1, waiting=(waiting,), waiting_count=1)

    lines = render(status, now_ms=0).splitlines()

    assert f"  1 no-coverage, for up to 0 s, {text}: ledger 7" in lines


def test_the_gravest_reason_comes_first() -> None:
    reasons = (Reason.OPEN_LEDGER_GRACE, Reason.NO_TARGET, Reason.NO_COPY)
    waiting = tuple(note(place, reason) for place, reason in enumerate(reasons))
    status = replace(WHOLE, marked_count=3, waiting=waiting, waiting_count=3)

    told = [
        line.split(",")[0] for line in render(status, now_ms=0).splitlines() if "for up" in line
    ]

    assert told == ["  1 no-copy", "  1 no-target", "  1 open-ledger-grace"]


def test_of_what_changed_since_the_last_try_it_is_only_said_that_it_is_due() -> None:
    waiting = tuple(note(ledger_id, Reason.NO_COPY) for ledger_id in (5, 6, 7))
    status = replace(
        WHOLE, marked_count=3, waiting=waiting, waiting_count=3, overtaken=frozenset({5, 7})
    )

    lines = render(status, now_ms=0).splitlines()

    assert lines[-3:] == [
        "  2 due, as a bookie came or an order changed since the last try: ledger 5, 7",
        "  1 no-copy, for up to 0 s, next try due: ledger 6",
        f"      {message(6, waiting[1].blocked).text}",
    ]
    assert (status.verdict, replace(status, overtaken=frozenset()).verdict) == (
        "repairing",
        "stuck",
    )
    assert status.to_json()["waiting"]["overtaken"] == [5, 7]


@in_virtual_time
async def test_a_bookie_that_came_back_overtakes_what_was_noted_before() -> None:
    cluster = await Cluster.start()
    for ledger_id, ensemble in enumerate([(B1, B2), (B1, B2, B3)]):
        await cluster.write_ledger(ensemble, ledger_id=ledger_id)
        await cluster.mark(B1, B2, ledger_id=ledger_id)
    await cluster.kill(B1, B2)

    async def all_wait() -> bool:
        return (await gather_status(visiting(cluster), clock=cluster.clock)).waiting_count == 2

    async with cluster.node() as node, working(node):
        await until(cluster, all_wait)
    before = await gather_status(visiting(cluster), clock=cluster.clock)
    await cluster.revive(B1)
    after = await gather_status(visiting(cluster), clock=cluster.clock)
    async with cluster.node() as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))

    assert before.overtaken == frozenset()
    assert after.overtaken == {0, 1}
    assert "may have one: not registered" in render(before, now_ms=0)
    assert "may have one: not registered" not in render(after, now_ms=0)
