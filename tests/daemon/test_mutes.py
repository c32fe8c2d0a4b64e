"""Conditions that an operator mutes: ``bookmender status --mute``."""

import asyncio

import pytest

from daemon.operations.mutes import mute, unmute
from daemon.status.condition import entry_of
from daemon.status.conditions import conditions
from daemon.status.gathering import gather_status
from daemon.status.report import status_record
from ledgers.errors import RejectedError
from replication.history import read_history
from replication.orders import mutes_znode
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.nodes import PATHS

NO_AUDITOR = entry_of("no-auditor")


async def is_muted(cluster: Cluster) -> bool:
    status = await gather_status(visiting(cluster), clock=cluster.clock)
    (found,) = conditions(status)
    return found.muted_until_ms is not None


@in_virtual_time
async def test_a_condition_is_muted_until_its_time_is_over() -> None:
    cluster = await Cluster.start()
    here = visiting(cluster)

    await mute(here, NO_AUDITOR, duration_s=100, reason="planned", clock=cluster.clock)
    status = await gather_status(here, clock=cluster.clock)
    await asyncio.sleep(101)

    record = status_record(status)
    assert (record.health, record.mutes[0].by, record.mutes[0].reason) == ("OK", here.by, "planned")
    assert not await is_muted(cluster)
    (event,) = (await read_history(cluster.store, PATHS, 0)).events
    assert (event.event.order, event.event.cause) == ("status --mute", "NO_AUDITOR")


@in_virtual_time
async def test_a_mute_can_be_ended() -> None:
    cluster = await Cluster.start()
    here = visiting(cluster)
    await mute(here, NO_AUDITOR, duration_s=100, reason="", clock=cluster.clock)

    assert [await unmute(here, NO_AUDITOR, clock=cluster.clock) for _ in range(2)] == [True, False]
    assert not await is_muted(cluster)


@in_virtual_time
async def test_what_says_that_data_is_unavailable_cannot_be_muted() -> None:
    cluster = await Cluster.start()
    with pytest.raises(RejectedError, match="cannot be muted"):
        await mute(
            visiting(cluster),
            entry_of("LEDGERS_UNAVAILABLE"),
            duration_s=100,
            reason="",
            clock=cluster.clock,
        )


@in_virtual_time
async def test_an_unreadable_order_mutes_nothing() -> None:
    cluster = await Cluster.start()
    path = mutes_znode(PATHS).path
    await cluster.store.create(path, b"{", with_parents=True)

    status = await gather_status(visiting(cluster), clock=cluster.clock)

    assert (status.orders.mutes, status.orders.unreadable) == ({}, (path,))
