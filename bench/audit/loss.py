"""Measures one loss: from the deletion of a bookie's znode until all its ledgers are marked.

All times are ZooKeeper's, which stamps the deletion and each mark. So the marks need no fast
polling: one ``exists`` of each directory of marks at a time is enough.
"""

import asyncio
import time
from collections.abc import Sequence

from bench.audit.field import Field, Victim
from bench.audit.records import Loss
from bench.usage import cpu_of, rss_bytes, rss_bytes_max
from daemon.local.processes import Child
from ledgers.errors import NoNodeError, UnavailableError
from tests.znode_cluster import PATHS

POLL_S = 0.02
READS_AT_ONCE = 500


async def measure_loss(
    field: Field,
    victim: Victim,
    child: Child,
    *,
    contender: str,
    repeat: int,
    ledgers_per_s: float | None,
    timeout_s: float,
) -> Loss:
    """Measure one loss. Raises UnavailableError if the daemon ends. A timeout is a result, not an
    error."""
    rss = rss_bytes(child.pid)
    cpu, zookeeper_cpu = cpu_of([child.pid]), cpu_of([field.zookeeper_pid])
    packets = field.packets()
    gone_ms = await field.lose(victim)
    is_whole = await _wait_marked(field, victim, child, timeout_s)
    packets = field.packets() - packets
    cpu, zookeeper_cpu = (
        cpu_of([child.pid]) - cpu,
        cpu_of([field.zookeeper_pid]) - zookeeper_cpu,
    )
    marked_ms = await _marked_ms(field, victim)
    return Loss(
        size=field.size,
        contender=contender,
        repeat=repeat,
        ledger_count=len(victim.ledger_ids),
        first_mark_s=(min(marked_ms) - gone_ms) / 1000 if marked_ms else None,
        all_marked_s=(max(marked_ms) - gone_ms) / 1000 if is_whole else None,
        packets=packets,
        cpu_s=cpu.total_s,
        zookeeper_cpu_s=zookeeper_cpu.total_s,
        rss_bytes=rss,
        rss_bytes_max=rss_bytes_max(child.pid),
        ledgers_per_s=ledgers_per_s,
    )


async def _wait_marked(field: Field, victim: Victim, child: Child, timeout_s: float) -> bool:
    """Wait for all marks. Return True if they came in time."""
    directories = {PATHS.mark(ledger_id).rsplit("/", 2)[0] for ledger_id in victim.ledger_ids}
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        stats = await asyncio.gather(*map(field.store.exists, directories))
        if sum(stat.child_count for stat in stats if stat is not None) >= len(victim.ledger_ids):
            return True
        if not child.is_running:
            raise UnavailableError(
                f"{child.name} ended; the end of {child.log}:\n{child.log_tail()}"
            )
        await asyncio.sleep(POLL_S)
    return False


async def _marked_ms(field: Field, victim: Victim) -> Sequence[int]:
    """Return when each mark was created, by ZooKeeper's clock."""
    found: list[int] = []
    for start in range(0, len(victim.ledger_ids), READS_AT_ONCE):
        part = victim.ledger_ids[start : start + READS_AT_ONCE]
        found += filter(None, await asyncio.gather(*(_made_ms(field, each) for each in part)))
    return found


async def _made_ms(field: Field, ledger_id: int) -> int | None:
    try:
        _, stat = await field.store.get(PATHS.mark(ledger_id))
    except NoNodeError:
        return None
    return stat.ctime_ms
