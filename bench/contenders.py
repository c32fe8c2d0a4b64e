"""Who is measured: one daemon process of ours, or of Java's, and what it has used up."""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from daemon.demo.nodes import cpu_s
from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child

JAVA = "Java"
SESSION_TIMEOUT_S = 4
RSS_MAX_RESET = "5"


@dataclass(frozen=True, slots=True)
class Contender:
    """``start`` brings up its daemon against a cluster."""

    name: str
    start: Callable[[LocalCluster], Child]


def java() -> Contender:
    """AutoRecovery with its default settings, batch size included."""
    return Contender(JAVA, lambda cluster: cluster.start_autorecovery())


def ours(reads_in_flight: int) -> Contender:
    """Our daemon with so many reads in flight per bookie, otherwise its default settings."""

    def start(cluster: LocalCluster) -> Child:
        name = f"bookmender-{reads_in_flight}"
        return Child(
            name,
            [sys.executable, "-m", "daemon", "daemon"],
            log=cluster.logs / f"{name}.log",
            environment=_environment(
                {
                    "METADATA_SERVICE_URI": cluster.metadata_service_uri,
                    "NODE_STATE_DIR": str(cluster.data / name),
                    "ZOOKEEPER_SESSION_TIMEOUT_S": str(SESSION_TIMEOUT_S),
                    "LIMITS_READS_IN_FLIGHT_PER_BOOKIE": str(reads_in_flight),
                }
            ),
        )

    return Contender(f"ours, {reads_in_flight} reads", start)


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Our own without the user's settings of bookmender."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("BOOKMENDER_")}
    return inherited | {f"BOOKMENDER_{key}": value for key, value in settings.items()}


def used_cpu_s(child: Child) -> float:
    """User and system time so far, to 10 ms."""
    return cpu_s(child.pid)


def forget_rss_max(child: Child) -> None:
    """Let ``rss_bytes_max`` count from now on; where the kernel refuses, it counts from the start."""
    with suppress(OSError):
        Path(f"/proc/{child.pid}/clear_refs").write_text(RSS_MAX_RESET)


def rss_bytes_max(child: Child) -> int:
    for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
