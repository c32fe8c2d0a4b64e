"""Inspect ledgers of a cluster in memory as fsck's executors do, but without a session."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import pytest

from auditor.fsck.executor import inspect_all, inspect_ledger, recheck_ledger
from auditor.fsck.ledger_inspector import LedgerInspector
from auditor.fsck.options import FsckOptions, Level
from auditor.fsck.verdicts import Finding, Grade, LedgerVerdict
from ledgers.clock import Clock
from ledgers.codec.layout import Layout
from ledgers.health import AnsweringBookies, BookieHealth
from ledgers.manager import LedgerManager
from ledgers.model import BookieId, LedgerMetadata
from ledgers.registration import Registration
from ledgers.secret import Secret
from replication.cluster import ViewSource
from replication.orders import OrderStore
from tests.memory.store import MemoryStore
from tests.replication.cluster import DIGEST, PAYLOAD_BYTES, Cluster, named_by
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, PATHS, ROOT

ALL = (B1, B2, B3)


async def one_ledger(
    *ensembles: tuple[BookieId, ...], **fields: object
) -> tuple[Cluster, LedgerMetadata]:
    """Write a ledger with three copies of each entry, of which two are acknowledged."""
    cluster = await Cluster.start()
    wanted = {"write_quorum": 3, "ack_quorum": 2} | fields
    versioned = await cluster.write_ledger(*(ensembles or (ALL,)), **wanted)  # type: ignore[arg-type]
    return cluster, versioned.metadata


def options(level: Level = Level.FULL, **changes: Any) -> FsckOptions:
    fields: dict[str, Any] = {
        "sample_share": 0.3,
        "default_password": Secret(""),
        "ledgers_at_once": 8,
    } | changes
    return FsckOptions(metadata_service_uri="zk://127.0.0.1/ledgers", level=level, **fields)


async def executor(
    cluster: Cluster, wanted: FsckOptions, clock: Clock | None = None
) -> LedgerInspector:
    store = MemoryStore(cluster.tree).as_read_only()
    clock = clock or cluster.clock
    views = ViewSource(Registration(store, ROOT), clock, OrderStore(store, PATHS))
    await views.refresh()
    bookies = AnsweringBookies(cluster.bookies, BookieHealth(clock, views.life))
    return LedgerInspector(
        options=wanted,
        manager=LedgerManager(store, ROOT, Layout.HIERARCHICAL),
        bookies=bookies,
        views=views,
        clock=clock,
    )


def let_in(monkeypatch: pytest.MonkeyPatch, module: ModuleType, cluster: Cluster) -> None:
    """Make each ``read_session`` of the module reach the cluster, for any URI."""

    @asynccontextmanager
    async def session(*wanted: object) -> AsyncIterator[tuple[object, object]]:
        yield cluster.store, None

    async def manager(store: object, uri: object) -> LedgerManager:
        return LedgerManager(cluster.store, ROOT, Layout.HIERARCHICAL)

    monkeypatch.setattr(module, "read_session", session)
    monkeypatch.setattr(LedgerManager, "open", manager)


async def inspect_once(
    cluster: Cluster, level: Level = Level.FULL, ledger_id: int = LEDGER, **changes: Any
) -> LedgerVerdict:
    """Return the verdict of the first check alone."""
    verdict = await inspect_ledger(await executor(cluster, options(level, **changes)), ledger_id)
    assert verdict is not None, ledger_id
    return verdict


async def inspect_twice(
    cluster: Cluster, level: Level = Level.FULL, ledger_id: int = LEDGER, **changes: Any
) -> LedgerVerdict | None:
    """Check, and recheck what seems wrong, as a run does. None: the ledger was deleted."""
    first = await inspect_ledger(await executor(cluster, options(level, **changes)), ledger_id)
    if first is None or not first.needs_recheck:
        return first
    return await recheck_ledger(await executor(cluster, options(level, **changes)), first)


async def inspect_many(
    cluster: Cluster, ledger_ids: Sequence[int], level: Level = Level.FULL, **changes: Any
) -> dict[int, LedgerVerdict]:
    """Return the first verdicts of all the ledgers."""
    found: dict[int, LedgerVerdict] = {}

    async def tell(verdict: LedgerVerdict) -> None:
        assert verdict.ledger_id not in found, verdict
        found[verdict.ledger_id] = verdict

    made = await executor(cluster, options(level, **changes))
    await inspect_all(made, ledger_ids, inspect_ledger, tell)
    return found


def told(verdict: LedgerVerdict | None) -> tuple[Grade, tuple[Finding, ...]]:
    assert verdict is not None
    return verdict.grade, verdict.findings


def replace_payload(cluster: Cluster, bookie: BookieId, entry_id: int, **changes: Any) -> None:
    """Replace an entry by another one with a right digest."""
    fields: dict[str, Any] = {
        "ledger_id": LEDGER,
        "entry_id": entry_id,
        "lac": entry_id - 1,
        "length": PAYLOAD_BYTES * (entry_id + 1),
        "payload": bytes(PAYLOAD_BYTES),
    }
    cluster.bookie(bookie).add(
        DIGEST.pack(**(fields | changes)),
        master_key=DIGEST.master_key,
        is_recovery=True,
        is_high_priority=False,
    )


def lose(cluster: Cluster, metadata: LedgerMetadata, entry_id: int, copies: int) -> list[BookieId]:
    """Delete that many copies of the entry, in the order of its write set. Return their bookies."""
    bookies = list(named_by(metadata, entry_id))[:copies]
    for bookie in bookies:
        cluster.bookie(bookie).lose(LEDGER, entry_id)
    return bookies
