"""Helpers for the tests of the auditor."""

import asyncio
from collections.abc import Sequence

from auditor.records import AuditRecord
from auditor.settings import AuditorSettings
from ledgers.model import BookieId
from replication import znodes
from replication.records import Record
from replication.znodes import MarkPaths
from tests.auditor.auditing import Leader
from tests.replication.cluster import Cluster
from tests.replication.nodes import PATHS

DELAY = PATHS.recovery_delay
SOON_S = 0.5
"""Within so long the auditor does what it does at once."""


async def with_ledgers(*ensembles: Sequence[BookieId]) -> Cluster:
    """Return a cluster with closed ledgers 0, 1, … on these bookies."""
    cluster = await Cluster.start()
    for ledger_id, ensemble in enumerate(ensembles):
        await cluster.write_ledger(ensemble, ledger_id=ledger_id)
    return cluster


def delayed(delay_s: int) -> AuditorSettings:
    return AuditorSettings(lost_bookie_recovery_delay_s=delay_s)


async def set_delay(cluster: Cluster, delay_s: int) -> None:
    data = znodes.recovery_delay_to_bytes(delay_s)
    await cluster.store.set(DELAY, data, version=-1)


async def marked_soon(cluster: Cluster) -> list[int]:
    await asyncio.sleep(SOON_S)
    return await cluster.marked()


async def replicas(
    cluster: Cluster, ledger_id: int, paths: MarkPaths = PATHS
) -> tuple[BookieId, ...]:
    """Return the bookies in a ledger's mark, in the shared tree or in our private one."""
    data, _ = await cluster.store.get(paths.mark(ledger_id))
    return znodes.parse_mark(data).replicas


def count_audits(leader: Leader) -> list[float]:
    """Return a list that grows by the time of each completed audit."""
    times_s: list[float] = []
    write = leader.records.write

    async def counted(record: Record) -> None:
        if isinstance(record, AuditRecord):
            times_s.append(asyncio.get_running_loop().time())
        await write(record)

    leader.records.write = counted  # type: ignore[method-assign]
    return times_s
