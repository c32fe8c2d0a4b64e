"""Our auditors as processes: which one leads, which is killed, and their memory over time."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.usage import rss_bytes
from daemon.local.processes import Child, stop_all
from tests.cluster.steps import AUDITOR_ONLY, STOP_TIMEOUT_S, leading_pid, start_node
from tests.znode_cluster import PATHS, ZnodeCluster

SETTINGS = AUDITOR_ONLY | {
    # So many bookies fail that a hold would be in force most of the time.
    "HOLD_ENABLED": "false",
    # Otherwise the ledger map of a new leader would look like growth.
    "AUDITOR_STANDBYS_KEEP_LEDGER_MAP": "true",
    "LOG_LEVEL": "info",
    "ZOOKEEPER_SESSION_TIMEOUT_S": "4",
}
RESTARTS_AFTER_S = (1.0, 5.0)


@dataclass(slots=True)
class Leaders:
    """``uri``: of the cluster; ``folder``: for the logs of the nodes."""

    cluster: ZnodeCluster
    uri: str
    folder: Path
    running: dict[str, Child] = field(default_factory=dict)
    kill_count: int = 0
    samples: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Seconds and RSS in bytes for each node, since its start."""

    def start(self, name: str) -> None:
        self.samples[name] = []
        self.running[name] = start_node(name, self.uri, self.folder, settings=SETTINGS)

    async def leader(self) -> str | None:
        """Return the node that leads, or None. May raise UnavailableError."""
        pid = await leading_pid(self.cluster.store, PATHS)
        return next((name for name, node in self.running.items() if node.pid == pid), None)

    async def kill_leader(self, rng: random.Random) -> None:
        """Kill the leader, and start it again after a while."""
        name = await self.leader()
        if name is None:
            return
        self.running[name].kill()
        self.kill_count += 1
        await asyncio.sleep(rng.uniform(*RESTARTS_AFTER_S))
        self.start(name)

    def weigh(self, *, now_s: float) -> None:
        for name, node in self.running.items():
            if node.is_running:
                self.samples[name].append((now_s, rss_bytes(node.pid)))

    def ended(self) -> list[str]:
        """Return the nodes that ended by themselves, which no node should do."""
        return [name for name, node in self.running.items() if not node.is_running]

    async def stop(self) -> None:
        await asyncio.to_thread(stop_all, list(self.running.values()), timeout_s=STOP_TIMEOUT_S)


def growth_bytes_per_s(samples: Sequence[tuple[float, int]]) -> float:
    """Return the slope by least squares, because samples jump by whole arenas.

    0 for fewer than two samples.
    """
    count = len(samples)
    if count < 2:
        return 0.0
    mean_s = sum(at_s for at_s, _ in samples) / count
    mean_bytes = sum(weight for _, weight in samples) / count
    spread = sum((at_s - mean_s) ** 2 for at_s, _ in samples)
    return sum((at_s - mean_s) * (weight - mean_bytes) for at_s, weight in samples) / spread
