"""The contenders: one daemon process, ours or Java's, and its settings.

The open-ledger grace is the same for both, and shorter than the default of 30 s of both: a longer
wait would only make the measurement longer.
"""

import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bench.waiting import wait_until
from daemon.local.processes import Child
from ledgers.errors import NoNodeError
from ledgers.store import MetadataStore
from replication.znodes import ClusterPaths

OTHER = "other"
"""The name of the contender of another checkout."""
OPEN_LEDGER_GRACE_S = 5
SESSION_TIMEOUT_S = 4
ELECTION_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 15.0
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
    settings file. ``tree``: the checkout whose node runs; None: this one."""

    name: str
    title: str
    is_ours: bool
    settings: Mapping[str, str] = field(default_factory=dict)
    tree: Path | None = None

    def start(self, ground: Ground, *, before: Sequence[str] = PLAIN) -> Child:
        """Start the daemon. It is ready when its vote is in ZooKeeper. ``before``: arguments of our
        Python that precede the daemon's."""
        if not self.is_ours:
            grace = {"openLedgerRereplicationGracePeriod": str(OPEN_LEDGER_GRACE_S * 1_000)}
            return ground.start_autorecovery(self.name, settings=grace | dict(self.settings))
        settings = {
            "metadata_service_uri": ground.metadata_service_uri,
            "node.state_dir": str(ground.data / self.name),
            "zookeeper.session_timeout_s": str(SESSION_TIMEOUT_S),
            "replication.open_ledger_grace_s": str(OPEN_LEDGER_GRACE_S),
            "http.port": "0",  # several nodes share this machine's ports
            **self.settings,
        }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("BOOKMENDER_")}
        given = {f"BOOKMENDER_{k.replace('.', '_').upper()}": v for k, v in settings.items()}
        # "env -C" becomes the Python that it starts, so the child's process id is the daemon's.
        python = (
            [sys.executable]
            if self.tree is None
            else ["env", "-C", str(self.tree), str(self.tree / ".venv/bin/python")]
        )
        return Child(
            self.name,
            [*python, *before, "daemon"],
            log=ground.logs / f"{self.name}.log",
            environment=inherited | given,
        )


@asynccontextmanager
async def elected(
    contender: Contender,
    ground: Ground,
    store: MetadataStore,
    paths: ClusterPaths,
    *,
    before: Sequence[str] = PLAIN,
) -> AsyncIterator[Child]:
    """Yield the contender's daemon when it is elected. At the end, wait until its vote is deleted.

    Raises UnavailableError.
    """

    async def has_votes() -> bool:
        try:
            return bool(await store.children(paths.election))
        except NoNodeError:
            return False

    async def has_no_votes() -> bool:
        return not await has_votes()

    child = contender.start(ground, before=before)
    try:
        await wait_until(has_votes, "an election", timeout_s=ELECTION_TIMEOUT_S, child=child)
        yield child
    finally:
        child.terminate()
        if not child.wait(timeout_s=STOP_TIMEOUT_S):
            child.kill()
    await wait_until(has_no_votes, "the end of its vote", timeout_s=ELECTION_TIMEOUT_S)


async def wait_ledger_map(child: Child, *, timeout_s: float) -> None:
    """Wait until our daemon, which logs JSON, has read all ledgers."""
    await wait_until(
        lambda: bool(events(child, "ledger_map.built")),
        "the first scan",
        timeout_s=timeout_s,
        child=child,
    )


def events(child: Child, name: str) -> list[dict[str, float]]:
    """Return the events that a daemon logged as JSON; none for Java's."""
    lines = child.log.read_text().splitlines()
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    return [event for event in logged if event.get("event") == name]


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
    settings={"node.nice": "0", "replication.yields_to_writers": "false"},
)
CONTENDERS = (JAVA, JAVA_TUNED, OURS, OURS_OPEN)


def other_tree(tree: Path) -> Contender:
    """Return our node of another checkout, with the same settings."""
    return Contender(name=OTHER, title="the other tree", is_ours=True, tree=tree)


TITLES = {contender.name: contender.title for contender in (*CONTENDERS, other_tree(Path()))}
"""Titles by name, in the order of the reports."""
