"""The demonstration's daemons: separate processes, whose logs are read as events."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daemon.local.processes import Child, rss_bytes, stop_all

STOP_TIMEOUT_S = 6.0


@dataclass(slots=True)
class Node:
    """One daemon process, and the position up to which its log has been read."""

    name: str
    child: Child
    log: Path
    _read_bytes: int = 0

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events that the daemon logged since the last call."""
        with self.log.open("rb") as log:
            log.seek(self._read_bytes)
            for line in log:
                if not line.endswith(b"\n"):
                    break  # an incomplete line: the rest is read next time
                self._read_bytes += len(line)
                try:
                    yield json.loads(line)
                except ValueError:
                    yield {"event": "unreadable", "line": line.decode(errors="replace").rstrip()}


@dataclass(slots=True)
class Nodes:
    """Owns ``count`` daemons on one cluster. They end with ``stop``, or with this process."""

    data: Path
    settings: Mapping[str, str]
    """Environment variables that override those of this process."""
    config: Path | None = None
    """The file of the daemons' settings."""
    nodes: list[Node] = field(default_factory=list)

    def start(self, count: int) -> None:
        for number in range(1, count + 1):
            name = f"node-{number}"
            log = self.data / "logs" / f"{name}.log"
            environment = {
                **{k: v for k, v in os.environ.items() if not k.startswith("BOOKMENDER_")},
                "BOOKMENDER_NODE_STATE_DIR": str(self.data / name),
                "BOOKMENDER_LOG_FORMAT": "json",
                "BOOKMENDER_LOG_LEVEL": "debug",
                "BOOKMENDER_HTTP_PORT": "0",  # several nodes share this machine's ports
                **self.settings,
            }
            config = [] if self.config is None else ["--config", str(self.config)]
            command = [sys.executable, "-m", "daemon", "daemon", *config]
            child = Child(name, command, log=log, environment=environment)
            self.nodes.append(Node(name=name, child=child, log=log))

    def running(self) -> list[Node]:
        return [node for node in self.nodes if node.child.is_running]

    def cpu_s(self) -> dict[str, float]:
        """Return the user and system time of each running daemon, by name."""
        return {node.name: cpu_s(node.child.pid) for node in self.running()}

    def rss_bytes_max(self) -> int:
        return max((rss_bytes(node.child.pid) or 0 for node in self.running()), default=0)

    def stop(self) -> None:
        stop_all([node.child for node in self.running()], timeout_s=STOP_TIMEOUT_S)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process; 0 if there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
