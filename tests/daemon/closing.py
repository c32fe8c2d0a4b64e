"""Open ledgers on a cluster in memory, and how tests close them by hand."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any

from auditor.checks.idle import LastChange, last_changes_to_json
from daemon.operations.close import LedgerCloser, LedgerClosing
from ledgers.model import LedgerState
from ledgers.placement import RandomPlacement
from ledgers.registration import Registration
from replication import znodes
from replication.cluster import ViewSource
from replication.history import NO_HISTORY, History
from replication.nodes import Membership, Role
from replication.open_ledgers import OpenLedgers
from replication.orders import OrderStore
from replication.targets import TargetSelector
from replication.znodes import Mark
from tests.replication.cluster import DIGEST, Cluster
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, PATHS, ROOT, node_info

DAY_S = 86_400


async def remember(cluster: Cluster, sightings: Mapping[int, LastChange]) -> None:
    """Write the sightings, as the leader's check does."""
    await cluster.store.create(PATHS.idle, last_changes_to_json(sightings), with_parents=True)


async def idle_ledger(state: LedgerState = LedgerState.OPEN, **fields: Any) -> Cluster:
    """Return a cluster with entries 0 to 9, which the check saw more than a day ago."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), state=state, **fields)
    await remember(cluster, {LEDGER: LastChange(last_entry_id=9, since_ms=cluster.clock.wall_ms())})
    await asyncio.sleep(DAY_S)
    return cluster


async def closer(cluster: Cluster, history: History = NO_HISTORY) -> LedgerCloser:
    views = ViewSource(
        Registration(cluster.store, ROOT), cluster.clock, OrderStore(cluster.store, PATHS)
    )
    await views.refresh()
    target_selector = TargetSelector(RandomPlacement(random.Random(0)), clock=cluster.clock)
    return LedgerCloser(
        store=cluster.store,
        manager=cluster.manager,
        bookies=cluster.bookies,
        views=views,
        open_ledgers=OpenLedgers(
            manager=cluster.manager,
            bookies=cluster.bookies,
            views=views,
            fallback_digest=DIGEST,
            target_selector=target_selector,
            clock=cluster.clock,
            history=history,
        ),
        paths=PATHS,
        after_s=DAY_S,
        clock=cluster.clock,
        tell=lambda text: None,
    )


async def close(
    cluster: Cluster,
    *,
    is_forced: bool = False,
    accepts_loss: bool = False,
    history: History = NO_HISTORY,
) -> LedgerClosing:
    membership = await Membership.join(cluster.store, PATHS, node_info("me", Role.HAND))
    return await (await closer(cluster, history)).close(
        LEDGER,
        session=membership.guard.check,
        holder="me",
        is_forced=is_forced,
        accepts_loss=accepts_loss,
    )


async def unproven_ledger(*, own: bool = False) -> Cluster:
    """Return a cluster in which only B1 and B2 had entry 9, and both were reformatted.

    The ledger is marked in the private queue (``own``) or in the shared one.
    """
    cluster = await idle_ledger()
    for bookie in (B1, B2):
        await cluster.kill(bookie)
        await cluster.wipe(bookie)
        await cluster.revive(bookie)
    mark = (PATHS.private if own else PATHS).mark(LEDGER)
    await cluster.store.create(
        mark, znodes.mark_to_bytes(Mark(replicas=(B1, B2))), with_parents=True
    )
    return cluster
