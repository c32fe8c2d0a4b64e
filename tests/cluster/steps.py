"""Steps that cluster tests share: ledgers that miss a bookie, daemons, waiting, proofs."""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from auditor.election import current_leader
from daemon.admin_session import AdminSession, admin_session
from daemon.cli.demo import prove
from daemon.local.processes import Child, stop_all
from daemon.settings import Settings, ZooKeeperSettings
from ledgers.errors import NodeExistsError
from ledgers.model import BookieId, DigestType, LedgerMetadata
from ledgers.security import OPEN, SecuritySettings
from ledgers.store import MetadataStore
from replication import znodes
from replication.marks import locked_ledger_ids, marked_ledger_ids
from replication.nodes import live_nodes
from replication.znodes import ClusterPaths, Mark
from tests.forked import ForkedChild
from tests.workload import Ending, Shape, Workload, Written, open_workload
from tests.zookeeper_server import PATIENT_SESSION_S

NONEXISTENT = BookieId("127.0.0.1:9")
"""A bookie that never existed. A ledger that names it is under-replicated without killing a
bookie."""
WORKER_ONLY = {"AUDITOR_ENABLED": "false"}
AUDITOR_ONLY = {"REPLICATION_ENABLED": "false"}
"""Settings of ``start_node``."""
WAIT_S = 120.0
POLL_S = 0.05
STOP_TIMEOUT_S = 5.0
SEED = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A cluster as a test sees it."""

    seen: AdminSession
    workload: Workload

    async def write(self, *shapes: Shape) -> list[Written]:
        before = len(self.workload.written)
        await self.workload.write_shapes(shapes)
        return self.workload.written[before:]

    async def lose(self, written: Sequence[Written], *, index: int = 0) -> None:
        """Make each ledger name a bookie that does not exist, in every segment, and mark it."""
        await self.forget(written, index=index)
        await self.mark([ledger.ledger_id for ledger in written])

    async def forget(self, written: Sequence[Written], *, index: int = 0) -> None:
        """Make each ledger name a bookie that does not exist, in every segment.

        An audit will find it.
        """
        manager = self.seen.manager
        for ledger in written:
            versioned = await manager.read(ledger.ledger_id)
            segments = tuple(
                s.with_bookies({index: NONEXISTENT}) for s in versioned.metadata.segments
            )
            metadata = replace(versioned.metadata, segments=segments)
            await manager.write(ledger.ledger_id, metadata, read_as=versioned)

    async def mark(self, ledger_ids: Sequence[int]) -> None:
        """Mark the ledgers for ``NONEXISTENT``, as an auditor would.

        Our leader may have marked some already.
        """
        store, paths = self.seen.store, self.seen.paths
        data = znodes.mark_to_bytes(Mark(replicas=(NONEXISTENT,), ctime_ms=1))
        for ledger_id in ledger_ids:
            with suppress(NodeExistsError):
                await store.create(paths.mark(ledger_id), data, with_parents=True)

    async def metadata(self, written: Written) -> LedgerMetadata:
        return (await self.seen.manager.read(written.ledger_id)).metadata

    async def names(self, written: Sequence[Written], bookie: BookieId) -> list[int]:
        """Return those of the ledgers whose metadata names the bookie."""
        return [w.ledger_id for w in written if bookie in (await self.metadata(w)).bookies]

    async def has_marked(self, ledger_ids: Sequence[int]) -> bool:
        """Return True if exactly these ledgers are marked."""
        return await marked_ledger_ids(self.seen.store, self.seen.paths) == sorted(ledger_ids)

    async def is_idle(self) -> bool:
        """Return True if there is no mark and no lock."""
        store, paths = self.seen.store, self.seen.paths
        return not await marked_ledger_ids(store, paths) and not await locked_ledger_ids(
            store, paths
        )

    async def wait_idle(self) -> None:
        await wait_for(self.is_idle, "an empty queue without locks")

    async def wait_repaired(self, written: Sequence[Written], lost: BookieId) -> None:
        """Wait until none of the ledgers names the bookie, and the queue is empty."""

        async def is_repaired() -> bool:
            return not await self.names(written, lost) and await self.is_idle()

        await wait_for(is_repaired, f"empty queue and no ledger that names {lost}")

    async def assert_whole(self, written: Sequence[Written]) -> None:
        """Assert that no entry is lost or wrong, and that every named copy exists."""
        for proof in await prove(written, self.workload):
            assert not proof.lost, proof
            assert not proof.wrong, proof
            assert proof.copies_good == proof.copies_expected > 0, proof


@asynccontextmanager
async def bench(uri: str, *, security: SecuritySettings = OPEN) -> AsyncIterator[Bench]:
    """Open a bench. Its own session survives what a test does to ZooKeeper."""
    patient = ZooKeeperSettings(session_timeout_s=PATIENT_SESSION_S)
    settings = Settings(metadata_service_uri=uri, zookeeper=patient, security=security)
    rng = random.Random(SEED)
    async with admin_session(settings) as seen, open_workload(seen, rng) as workload:
        try:
            yield Bench(seen=seen, workload=workload)
        finally:
            await workload.stop()


def shape(
    number: int,
    *,
    entry_count: int = 20,
    quorums: tuple[int, int, int] = (3, 2, 2),
    digest_type: DigestType = DigestType.CRC32C,
    ending: Ending = Ending.CLOSED,
    entry_bytes: int = 100,
) -> Shape:
    ensemble_size, write_quorum, ack_quorum = quorums
    return Shape(
        number=number,
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        digest_type=digest_type,
        metadata_version=3,
        entry_bytes=entry_bytes,
        entry_count=entry_count,
        is_left_open=ending is not Ending.CLOSED,
        is_live=ending is Ending.LIVE,
    )


async def wait_for(condition: Callable[[], Any], what: str, *, within_s: float = WAIT_S) -> Any:
    """Wait until the condition, perhaps a coroutine function, is true. Return its value."""
    deadline_s = time.monotonic() + within_s
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline_s, f"no {what} within {within_s:g} s"
        await asyncio.sleep(POLL_S)  # the condition depends on other processes


def start_node(
    name: str,
    uri: str,
    folder: Path,
    *,
    command: Sequence[str] = ("daemon", "daemon"),
    settings: Mapping[str, str] | None = None,
    tree: Path | None = None,
) -> Child:
    """Start a daemon process. ``settings`` have no prefix, as in ``AUDITOR_ENABLED``. ``tree``: the
    source tree to run, if it is not this one."""
    ours = {
        "METADATA_SERVICE_URI": uri,
        "NODE_STATE_DIR": str(folder / name),
        "NODE_NICE": "0",  # tests wait for it
        "ZOOKEEPER_SESSION_TIMEOUT_S": "2",
        "REPLICATION_IDLE_WAIT_S": "0.3",
        "REPLICATION_FREE_DISK_SHARE_MIN": "0",  # independent of the disk of this machine
        "HTTP_ENABLED": "false",  # several nodes share this machine's ports
        "LOG_LEVEL": "debug",
        "LOG_FORMAT": "json",
        **(settings or {}),
    }
    environment = {k: v for k, v in os.environ.items() if not k.startswith("BOOKMENDER_")}
    environment |= {f"BOOKMENDER_{key}": value for key, value in ours.items()}
    log = folder / f"{name}.log"
    if tree is None:
        return ForkedChild(name, command, log=log, environment=environment)
    environment["PYTHONPATH"] = str(tree)
    return Child(name, [sys.executable, "-P", "-m", *command], log=log, environment=environment)


@asynccontextmanager
async def nodes(uri: str, folder: Path) -> AsyncIterator[Callable[..., Child]]:
    """Yield ``start_node`` for this cluster.

    At the end, all daemons are stopped and leave no trace.
    """
    started: list[Child] = []

    def start(name: str, **options: Any) -> Child:
        started.append(start_node(name, uri, folder, **options))
        return started[-1]

    try:
        yield start
    finally:
        await asyncio.to_thread(stop_all, started, timeout_s=STOP_TIMEOUT_S)


async def leading_pid(store: MetadataStore, paths: ClusterPaths) -> int | None:
    """Return the process id of the node that leads. May raise UnavailableError."""
    leader = await current_leader(store, paths)
    live = {node.session_id: node.info.pid for node in await live_nodes(store, paths)}
    return None if leader is None else live.get(leader.session_id)


def is_frozen(node: Child) -> bool:
    """Return True if SIGSTOP has stopped the process."""
    stat = Path(f"/proc/{node.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def events(node: Child, name: str) -> list[dict[str, Any]]:
    """Return the events that the daemon logged under this name."""
    return [event for event in _log(node) if event.get("event") == name]


def errors(node: Child) -> list[dict[str, Any]]:
    return [event for event in _log(node) if event.get("level") in ("error", "critical")]


def _log(node: Child) -> list[dict[str, Any]]:
    found = []
    for line in node.log.read_text(errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            found.append({"event": "unreadable", "level": "error", "line": line})
    return found
