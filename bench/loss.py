"""Measures one loss: kills a bookie and watches the queue until no metadata names the bookie.

Watching costs ZooKeeper as little as possible: one ``exists`` of the queue's directory at a time.
That cost is subtracted, and so is the traffic of an idle cluster.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from auditor.scan import scan_ledgers
from bench.arena import Arena
from bench.loads import BenchLedger, stake
from bench.usage import cpu_of, cpu_of_machine, forget_rss_max, rss_bytes_max
from bench.waiting import wait_until
from daemon.local.processes import Child

POLL_S, POLL_SHARE = 0.005, 0.01
"""Minimum poll interval, and its share of the time elapsed. Polling disturbs the repair, so the
interval grows with the elapsed time."""
BESIDE_POLL_S = 0.02
"""Poll interval beside a writer. 200 polls a second would use a fifth of a core when the repair
begins."""
SESSION_END_TIMEOUT_S = 30.0
REPAIR_TIMEOUT_S = 240.0
SETTLE_S, IDLE_S = 2.0, 3.0
"""Time for the cluster to settle, and then for counting the packets of the idle cluster."""

Measure = dict[str, float]
"""The cost of one repair.

``whole_s`` runs from the deletion of the lost bookie's znode, at ``gone_at_s`` by the monotonic
clock, until the queue is empty and no metadata names the bookie. ``closed_whole_s``: when only open
ledgers were left. Bytes as stored, with headers and digests. CPU in seconds, user and system;
``bookies``: the survivors; ``machine``: all processes, also those that have nothing to do with the
bench. ``packets``: received by ZooKeeper, including those for marks.
"""


class Loss:
    """The loss of the arena's victim. ``child``: the daemon that repairs."""

    def __init__(
        self,
        arena: Arena,
        child: Child,
        ledgers: Sequence[BenchLedger],
        *,
        is_beside_writer: bool = False,
    ) -> None:
        self._arena, self._child, self._ledgers = arena, child, ledgers
        self._poll_s = BESIDE_POLL_S if is_beside_writer else POLL_S
        self._stake = stake(ledgers, arena.victim)
        self._directories = {
            arena.seen.paths.mark(ledger.ledger_id).rsplit("/", 2)[0] for ledger in ledgers
        }

    async def measure(self, *, idle_packets_per_s: float = 0.0) -> Measure:
        """Kill the victim, and return when all is repaired. Raises UnavailableError on a
        timeout."""
        arena = self._arena
        forget_rss_max(self._child.pid)
        packets, began_s = arena.packets(), time.monotonic()
        arena.cluster.kill(arena.victim)
        await self._wait(self._is_unregistered, SESSION_END_TIMEOUT_S)
        gone_s, before = time.monotonic(), self._used()
        await self._wait(self._is_marked, SESSION_END_TIMEOUT_S)
        first_mark_s = time.monotonic()
        closed_s, ended_s, after, packets_then = await self._wait_repaired()
        repairer, bookies, zookeeper, machine = (
            later - earlier for later, earlier in zip(after, before, strict=True)
        )
        return {
            **self._stake,
            "copied_bytes": await arena.copied_bytes(self._ledgers),
            "first_mark_s": first_mark_s - gone_s,
            "closed_whole_s": closed_s - gone_s,
            "whole_s": ended_s - gone_s,
            "repairer_cpu_s": repairer,
            "bookies_cpu_s": bookies,
            "zookeeper_cpu_s": zookeeper,
            "machine_cpu_s": machine,
            "packets": packets_then - packets - idle_packets_per_s * (ended_s - began_s),
            "rss_bytes_max": rss_bytes_max(self._child.pid),
            "gone_at_s": gone_s,
        }

    async def _wait_repaired(self) -> tuple[float, float, tuple[float, ...], int]:
        """Return when only open ledgers were left, when none were left, and the CPU and packets
        used until then.

        An empty queue alone proves nothing: some marks may not exist yet.
        """
        closed_s = time.monotonic()

        async def is_unmarked() -> bool:
            nonlocal closed_s
            marked = await self._marked_count()
            if marked > self._stake["lost_open_ledgers"]:
                closed_s = time.monotonic()
            return marked == 0

        while True:
            await self._wait(is_unmarked, REPAIR_TIMEOUT_S)
            ended_s, used, packets = time.monotonic(), self._used(), self._arena.packets()
            if not await self._is_named():
                return closed_s, ended_s, used, packets

    async def _wait(self, condition: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        await wait_until(
            condition,
            "the end of the repair",
            timeout_s=timeout_s,
            child=self._child,
            poll_s=self._poll_s,
            poll_share=POLL_SHARE,
        )

    async def _is_unregistered(self) -> bool:
        seen = self._arena.seen
        path = f"{seen.settings.uri.root}/available/{self._arena.victim}"
        return await seen.store.exists(path) is None

    async def _is_marked(self) -> bool:
        return await self._marked_count() > 0

    async def _marked_count(self) -> int:
        store = self._arena.seen.store
        stats = [await store.exists(directory) for directory in self._directories]
        return sum(stat.child_count for stat in stats if stat is not None)

    async def _is_named(self) -> bool:
        """Return True if any metadata still names the victim."""
        scan = await scan_ledgers(self._arena.seen.manager, lost=[self._arena.victim])
        return bool(scan.underreplicated or scan.unreadable)

    def _used(self) -> tuple[float, ...]:
        """Return the CPU of the repairer, the bookies, ZooKeeper and the whole machine."""
        cluster = self._arena.cluster
        return (
            cpu_of([self._child.pid]),
            cpu_of(cluster.pid(bookie) for bookie in self._arena.survivors),
            cpu_of([cluster.zookeeper_pid]),
            cpu_of_machine(),
        )


async def idle_packets_per_s(arena: Arena) -> float:
    """Return the packets per second that ZooKeeper receives while the cluster and the daemon are
    idle."""
    await asyncio.sleep(SETTLE_S)
    packets, began_s = arena.packets(), time.monotonic()
    await asyncio.sleep(IDLE_S)
    return (arena.packets() - packets) / (time.monotonic() - began_s)
