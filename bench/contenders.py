"""The contenders: one daemon process, ours or Java's, and its settings.

The open-ledger grace is the same for both, and shorter than the default of 30 s of both: a longer
wait would only make the measurement longer.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from daemon.local.processes import Child

OPEN_LEDGER_GRACE_S = 5
SESSION_TIMEOUT_S = 4
PLAIN = ("-m", "daemon")


class Ground(Protocol):
    """The place where a daemon is started: a local cluster, or a replacement for one."""

    @property
    def metadata_service_uri(self) -> str: ...

    @property
    def data(self) -> Path: ...

    @property
    def logs(self) -> Path: ...

    def start_autorecovery(self, name: str, *, settings: Mapping[str, str]) -> Child: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One daemon to measure. ``settings``: override the defaults, by the names in the daemon's own
    settings file."""

    name: str
    title: str
    is_ours: bool
    settings: Mapping[str, str] = field(default_factory=dict)

    def start(self, ground: Ground, *, before: Sequence[str] = PLAIN) -> Child:
        """Start the daemon. It is ready when its vote is in ZooKeeper. ``before``: arguments of our
        Python that precede the daemon's."""
        if self.is_ours:
            return self._start_ours(ground, before)
        grace = {"openLedgerRereplicationGracePeriod": str(OPEN_LEDGER_GRACE_S * 1_000)}
        return ground.start_autorecovery(self.name, settings=grace | dict(self.settings))

    def _start_ours(self, ground: Ground, before: Sequence[str]) -> Child:
        settings = {
            "metadata_service_uri": ground.metadata_service_uri,
            "node.state_dir": str(ground.data / self.name),
            "zookeeper.session_timeout_s": str(SESSION_TIMEOUT_S),
            "replication.open_ledger_grace_s": str(OPEN_LEDGER_GRACE_S),
            "http.port": "0",  # several nodes share this machine's ports
            **self.settings,
        }
        return Child(
            self.name,
            [sys.executable, *before, "daemon"],
            log=ground.logs / f"{self.name}.log",
            environment=_environment(settings),
        )


JAVA = Contender(name="java", title="Java", is_ours=False)
JAVA_TUNED = Contender(
    name="java-tuned",
    title="Java tuned",
    is_ours=False,
    settings={
        "rereplicationEntryBatchSize": "1000",
        "recoveryBatchReadEnabled": "true",
        "batchReadEnabled": "true",
        "useV2WireProtocol": "true",  # without it batches are not read
    },
)
OURS = Contender(name="ours", title="ours", is_ours=True)
OURS_OPEN = Contender(
    name="ours-open",
    title="ours, opened up",
    is_ours=True,
    settings={
        "node.nice": "0",
        "replication.yields_to_writers": "false",
    },
)
CONTENDERS = (JAVA, JAVA_TUNED, OURS, OURS_OPEN)
BY_NAME = {contender.name: contender for contender in CONTENDERS}


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return our environment without the user's settings of bookmender."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("BOOKMENDER_")}
    given = {f"BOOKMENDER_{k.replace('.', '_').upper()}": v for k, v in settings.items()}
    return inherited | given
