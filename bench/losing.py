"""One loss, measured: a bookie is killed, and the queue watched until nothing names it any more.

The watching costs ZooKeeper as little as can be (one ``exists`` of the queue's directory at a time),
and what it costs is subtracted, as is what the cluster does when idle.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from auditor.scan import scan_ledgers
from bench.contenders import forget_rss_max, rss_bytes_max, used_cpu_s
from bench.loads import VICTIM_INDEX, Load
from daemon.demo.workload import Written
from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child
from daemon.visit import Visit
from ledgers.errors import UnavailableError
from ledgers.metadata import BookieId
from replication.payloads import mark_path

POLL_S = 0.005
SESSION_END_TIMEOUT_S = 30.0
REPAIR_TIMEOUT_S = 300.0
IDLE_S = 3.0
"""For so long the idle cluster's packets are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What one repair took. Times count from the end of the lost bookie's znode."""

    lost_ledgers: int
    lost_entries: int
    first_mark_s: float
    whole_s: float
    cpu_s: float
    packets: float
    """That ZooKeeper received, marks included, without the idle cluster's and the bench's own."""
    rss_bytes_max: int

    @property
    def figures(self) -> dict[str, float]:
        """By name; the unit is its end."""
        return {
            "first_mark_ms": self.first_mark_s * 1e3,
            "whole_s": self.whole_s,
            "ledgers_per_s": self.lost_ledgers / self.whole_s,
            "entries_per_s": self.lost_entries / self.whole_s,
            "cpu_s": self.cpu_s,
            "cpu_ms_per_ledger": self.cpu_s / self.lost_ledgers * 1e3,
            "cpu_us_per_entry": self.cpu_s / self.lost_entries * 1e6,
            "packets_per_ledger": self.packets / self.lost_ledgers,
            "rss_mb_max": self.rss_bytes_max / 1e6,
        }


class Loss:
    """The loss of the victim on a cluster, with ``child`` as the daemon that repairs."""

    def __init__(
        self, cluster: LocalCluster, seen: Visit, child: Child, written: Sequence[Written]
    ) -> None:
        self._cluster, self._seen, self._child = cluster, seen, child
        self._victim = cluster.bookies[VICTIM_INDEX]
        self._directories = {
            mark_path(seen.ur, ledger.ledger_id).rsplit("/", 2)[0] for ledger in written
        }

    @property
    def victim(self) -> BookieId:
        return self._victim

    async def measure(self, load: Load) -> Measure:
        """Kill, and return when all is repaired. Raises UnavailableError when it takes too long."""
        idle_packets_per_s = await self._idle_packets_per_s()
        forget_rss_max(self._child)
        packets, began_s = self._packets(), time.monotonic()
        self._cluster.kill(self._victim)
        await self._wait(self._is_gone, SESSION_END_TIMEOUT_S)
        gone_s, cpu_s = time.monotonic(), used_cpu_s(self._child)
        await self._wait(self._is_marked, SESSION_END_TIMEOUT_S)
        first_mark_s = time.monotonic()
        ended_s, cpu_s, packets = await self._wait_repaired(cpu_s, packets)
        lost_count = load.lost_count(self._cluster.bookies)
        return Measure(
            lost_ledgers=lost_count,
            lost_entries=lost_count * load.entry_count,
            first_mark_s=first_mark_s - gone_s,
            whole_s=ended_s - gone_s,
            cpu_s=cpu_s,
            packets=packets - idle_packets_per_s * (ended_s - began_s),
            rss_bytes_max=rss_bytes_max(self._child),
        )

    async def _wait_repaired(self, cpu_s: float, packets: int) -> tuple[float, float, int]:
        """When, and what was spent since ``cpu_s`` and ``packets``.

        An empty queue alone proves nothing: some marks may not have been made yet.
        """
        while True:
            await self._wait(self._is_unmarked, REPAIR_TIMEOUT_S)
            ended_s = time.monotonic()
            spent = used_cpu_s(self._child) - cpu_s, self._packets() - packets
            if not await self._is_named():
                return ended_s, *spent

    async def _wait(self, condition: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not await condition():
            if time.monotonic() > deadline_s or not self._child.is_running:
                raise UnavailableError(f"the repair does not end; see {self._child.log}")
            await asyncio.sleep(POLL_S)

    async def _is_gone(self) -> bool:
        path = f"{self._seen.settings.uri.root}/available/{self._victim}"
        return await self._seen.store.exists(path) is None

    async def _is_marked(self) -> bool:
        stats = [await self._seen.store.exists(directory) for directory in self._directories]
        return any(stat is not None and stat.child_count for stat in stats)

    async def _is_unmarked(self) -> bool:
        return not await self._is_marked()

    async def _is_named(self) -> bool:
        """Whether any metadata still names the victim."""
        scan = await scan_ledgers(self._seen.manager, lost=[self._victim], available=())
        return bool(scan.endangered or scan.unreadable)

    async def _idle_packets_per_s(self) -> float:
        packets, began_s = self._packets(), time.monotonic()
        await asyncio.sleep(IDLE_S)
        return (self._packets() - packets) / (time.monotonic() - began_s)

    def _packets(self) -> int:
        """Received by ZooKeeper so far, without this process's own requests."""
        monitor: dict[str, Any] = self._cluster.zookeeper_monitor()
        return int(monitor["zk_packets_received"]) - self._seen.store.request_count
