"""Our auditors as processes: who leads, who is killed, and what they weigh over time."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from auditor.election import current_leader
from bench.usage import rss_bytes
from daemon.local.processes import Child, stop_all
from replication.nodes import live_nodes
from tests.cluster.steps import AUDITOR_ONLY, STOP_TIMEOUT_S, start_node
from tests.znode_cluster import PATHS, ZnodeCluster

SETTINGS = AUDITOR_ONLY | {
    "HOLD_ENABLED": "false",  # so many go at once here that it would stand most of the time
    "AUDITOR_STANDBYS_KEEP_INDEX": "true",  # the index of a new leader is no growth
    "LOG_LEVEL": "info",
    "ZOOKEEPER_SESSION_TIMEOUT_S": "4",
}
RESTARTS_AFTER_S = (1.0, 5.0)


@dataclass(slots=True)
class Leaders:
    """``uri``: of the cluster; ``folder``: for their logs."""

    cluster: ZnodeCluster
    uri: str
    folder: Path
    running: dict[str, Child] = field(default_factory=dict)
    kill_count: int = 0
    samples: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Per node the seconds and the RSS in bytes, since it was started."""

    def start(self, name: str) -> None:
        self.samples[name] = []
        self.running[name] = start_node(name, self.uri, self.folder, settings=SETTINGS)

    async def leader(self) -> str | None:
        """The node that leads; None while none does. May raise UnavailableError."""
        leader = await current_leader(self.cluster.store, PATHS)
        live = {
            node.session_id: node.info.pid for node in await live_nodes(self.cluster.store, PATHS)
        }
        pid = None if leader is None else live.get(leader.session_id)
        return next((name for name, node in self.running.items() if node.pid == pid), None)

    async def kill_leader(self, rng: random.Random) -> None:
        """It comes back, as a candidate, a while later."""
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
        """Those that ended by themselves: none ever should."""
        return [name for name, node in self.running.items() if not node.is_running]

    async def stop(self) -> None:
        await asyncio.to_thread(stop_all, list(self.running.values()), timeout_s=STOP_TIMEOUT_S)


def growth_bytes_per_s(samples: Sequence[tuple[float, int]]) -> float:
    """By least squares: single samples jump by whole arenas. 0 for fewer than two."""
    count = len(samples)
    if count < 2:
        return 0.0
    mean_s = sum(at_s for at_s, _ in samples) / count
    mean_bytes = sum(weight for _, weight in samples) / count
    spread = sum((at_s - mean_s) ** 2 for at_s, _ in samples)
    return sum((at_s - mean_s) * (weight - mean_bytes) for at_s, weight in samples) / spread
