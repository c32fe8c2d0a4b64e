"""An absent bookie is lost after the recovery delay: a function of times."""

import asyncio
import math
from dataclasses import replace
from functools import partial

import pytest

from auditor.absence import (
    JOINED_MAX_S,
    Outage,
    Outages,
    delay_left_s,
    excused_until_s,
)
from auditor.records import UNSEEN_MAX_MS, StoredAbsences
from ledgers.model import BookieId
from tests.auditor.auditing import auditing, leading
from tests.auditor.scenes import marked_soon, with_ledgers
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3

scene = partial(with_ledgers, (B1, B2), (B2, B3))

A, B, C = (BookieId(f"bookie-{name}:3181") for name in "abc")


@pytest.mark.parametrize(
    ("absent_s", "delay_s", "is_lost"),
    [
        pytest.param(0, 0, True, id="without a delay a bookie is lost at once"),
        pytest.param(59, 60, False, id="just inside the delay"),
        pytest.param(60, 60, True, id="the boundary itself counts"),
    ],
)
def test_absent_bookies_become_lost(absent_s: float, delay_s: float, is_lost: bool) -> None:
    left_s = delay_left_s({A: 1000.0}, now_s=1000.0 + absent_s, delay_s=delay_s)

    assert (A not in left_s) is is_lost


def test_a_request_ends_the_delay_of_bookies_absent_then() -> None:
    """A bookie that disappears after the request still has its delay."""
    since_s = {A: 1000.0, B: 1050.0}

    assert delay_left_s(since_s, now_s=1060.0, delay_s=600, overruled_s=1020.0).keys() == {B}
    assert delay_left_s(since_s, now_s=1060.0, delay_s=600, overruled_s=1050.0) == {}


WALL_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("seen_ms_ago", "wall_ms_later", "away_s"),
    [
        pytest.param(0, 0, 50, id="at once"),
        pytest.param(0, 20_000, 70, id="the time between two leaders counts"),
        pytest.param(
            0, UNSEEN_MAX_MS, 50 + UNSEEN_MAX_MS / 1000, id="as long as auditors may stop watching"
        ),
        pytest.param(0, UNSEEN_MAX_MS + 1, None, id="no auditor watched for too long"),
        pytest.param(UNSEEN_MAX_MS, 1, None, id="also while that leader led"),
        pytest.param(0, -20_000, 30, id="a clock that is behind by less"),
        pytest.param(0, -3_600_000, 0, id="a clock that is behind by far"),
    ],
)
def test_a_new_leader_continues_the_recorded_absences(
    seen_ms_ago: int, wall_ms_later: int, away_s: float | None
) -> None:
    stored = StoredAbsences.of({A: 950.0}, now_s=1000.0, wall_ms=WALL_MS)
    stored = replace(stored, seen_ms=WALL_MS - seen_ms_ago)

    resumed = stored.resumed(now_s=7.0, wall_ms=WALL_MS + wall_ms_later)

    assert resumed == ({} if away_s is None else {A: 7.0 - away_s})


# --- After an outage of our own connection bookies have time to return before they are lost -------

OUTAGE = Outage(began_s=100.0, settled_s=130.0)


@pytest.mark.parametrize(
    ("since_s", "delay_s", "lost_s"),
    [
        pytest.param(99, 0, 99, id="absent before it began: the outage explains nothing"),
        pytest.param(99, 60, 159, id="nor does it change a delay"),
        pytest.param(100, 0, 130, id="absent as it began"),
        pytest.param(129, 0, 130, id="absent while others return"),
        pytest.param(131, 0, 131, id="absent afterwards"),
        pytest.param(110, 60, 170, id="a longer delay counts as usual"),
    ],
)
def test_absences_in_an_outage_are_lost_after_a_time_to_return(
    since_s: float, delay_s: float, lost_s: float
) -> None:
    for now_s, left_s in ((lost_s - 1, {B1: 1}), (lost_s, {})):
        found = delay_left_s({B1: since_s}, now_s=now_s, delay_s=delay_s, outage=OUTAGE)
        assert found == left_s


def outages_of(cluster: Cluster) -> Outages:
    return Outages(cluster.clock, return_s=20.0)


async def test_a_bookie_that_returns_after_an_outage_was_never_lost(cluster: Cluster) -> None:
    async with auditing(cluster, outages=outages_of(cluster)) as leader:
        cluster.tree.suspend(leader.store)
        await cluster.kill(B1)
        await asyncio.sleep(2)
        cluster.tree.resume(leader.store)

        await asyncio.sleep(18)
        assert await cluster.marked() == []
        await cluster.revive(B1)
        await asyncio.sleep(60)
        assert await cluster.marked() == []


async def test_a_bookie_that_does_not_return_is_lost_after_that_time(cluster: Cluster) -> None:
    async with auditing(cluster, outages=outages_of(cluster)) as leader:
        cluster.tree.suspend(leader.store)
        await cluster.kill(B1)
        await asyncio.sleep(2)
        cluster.tree.resume(leader.store)

        await asyncio.sleep(19)
        assert await cluster.marked() == []
        await asyncio.sleep(1)
        assert await marked_soon(cluster) == [0]


async def test_a_further_outage_shortens_no_time_to_return(cluster: Cluster) -> None:
    async with auditing(cluster, outages=outages_of(cluster)) as leader:
        cluster.tree.suspend(leader.store)
        await cluster.kill(B1)
        for _ in range(3):
            await asyncio.sleep(2)
            cluster.tree.resume(leader.store)
            await asyncio.sleep(4)
            cluster.tree.suspend(leader.store)
        await asyncio.sleep(0.2)
        cluster.tree.resume(leader.store)

        await asyncio.sleep(19)
        assert await cluster.marked() == []
        await asyncio.sleep(1.5)
        assert await marked_soon(cluster) == [0]


async def test_repeated_outages_do_not_hide_a_loss_for_ever(cluster: Cluster) -> None:
    async with auditing(cluster, outages=outages_of(cluster)) as leader:
        cluster.tree.suspend(leader.store)
        await cluster.kill(B1)
        for _ in range(round(2 * JOINED_MAX_S / 6)):
            cluster.tree.resume(leader.store)
            await asyncio.sleep(5)
            cluster.tree.suspend(leader.store)
            await asyncio.sleep(1)
        cluster.tree.resume(leader.store)

        assert await marked_soon(cluster) == [0]


async def test_a_loss_known_before_the_outage_waits_for_nothing(cluster: Cluster) -> None:
    async with auditing(cluster, outages=outages_of(cluster)) as leader:
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]
        cluster.tree.suspend(leader.store)
        await asyncio.sleep(2)
        cluster.tree.resume(leader.store)

        await cluster.write_ledger((B1, B3), ledger_id=9)
        assert await marked_soon(cluster) == [0, 9]


async def test_an_outage_that_ends_the_session_lasts_till_the_next_one() -> None:
    cluster = await with_ledgers((B1, B2))
    outages = outages_of(cluster)
    async with leading(cluster, outages=outages) as leader:
        cluster.tree.suspend(leader.store)
        await asyncio.sleep(5)
        await cluster.kill(B1)
        cluster.tree.expire(leader.store)
        cluster.tree.resume(leader.store)
    await asyncio.sleep(7)

    async with auditing(cluster, outages=outages):
        await asyncio.sleep(19)
        assert await cluster.marked() == []
        await asyncio.sleep(1)
        assert await marked_soon(cluster) == [0]


@pytest.mark.parametrize(
    ("since_s", "overruled_s", "excused"),
    [
        pytest.param(99, -math.inf, {}, id="absent before it began"),
        pytest.param(110, -math.inf, {B1: 130.0}, id="absent since the outage"),
        pytest.param(131, -math.inf, {}, id="absent afterwards"),
        pytest.param(110, 120, {}, id="an operator asks not to wait"),
    ],
)
def test_losses_delayed_by_an_outage_are_told_with_their_time(
    since_s: float, overruled_s: float, excused: dict[BookieId, float]
) -> None:
    assert excused_until_s({B1: since_s}, overruled_s=overruled_s, outage=OUTAGE) == excused
