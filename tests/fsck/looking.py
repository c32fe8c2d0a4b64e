"""fsck's looks at ledgers of a cluster in memory, as an executor has them, but without its
session."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import pytest

from auditor.fsck.copies import CopyInspector
from auditor.fsck.executor import Executor
from auditor.fsck.inspecting import look_again, look_at, look_at_all
from auditor.fsck.levels import FsckOptions, Level
from auditor.fsck.verdicts import Finding, Grade, LedgerVerdict
from ledgers.clock import Clock
from ledgers.codec.layout import Layout
from ledgers.health import Quarantine, QuarantiningBookies
from ledgers.manager import LedgerManager
from ledgers.memory.store import MemoryStore
from ledgers.model import BookieId, LedgerMetadata
from ledgers.registration import Registration
from ledgers.store import ReadOnlyStore
from replication.cluster import ViewSource
from replication.orders import OrderStore
from tests.replication.cluster import DIGEST, PAYLOAD_BYTES, Cluster, named_by
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, PATHS, ROOT

ALL = (B1, B2, B3)


async def one_ledger(
    *ensembles: tuple[BookieId, ...], **fields: object
) -> tuple[Cluster, LedgerMetadata]:
    """Three copies of each of its entries, of which two are acknowledged."""
    cluster = await Cluster.start()
    wanted = {"write_quorum": 3, "ack_quorum": 2} | fields
    versioned = await cluster.write_ledger(*(ensembles or (ALL,)), **wanted)  # type: ignore[arg-type]
    return cluster, versioned.metadata


def options(level: Level = Level.FULL, **changes: Any) -> FsckOptions:
    fields: dict[str, Any] = {
        "sample_share": 0.3,
        "default_password": "",
        "ledgers_at_once": 8,
    } | changes
    return FsckOptions(metadata_service_uri="zk://127.0.0.1/ledgers", level=level, **fields)


async def executor(cluster: Cluster, wanted: FsckOptions, clock: Clock | None = None) -> Executor:
    store = ReadOnlyStore(MemoryStore(cluster.tree))
    clock = clock or cluster.clock
    views = ViewSource(Registration(store, ROOT), clock, OrderStore(store, PATHS))
    await views.refresh()
    bookies = QuarantiningBookies(cluster.bookies, Quarantine(clock, views.life))
    return Executor(
        manager=LedgerManager(store, ROOT, Layout.HIERARCHICAL),
        copies=CopyInspector(wanted, bookies=bookies, views=views, clock=clock),
        clock=clock,
    )


def let_in(monkeypatch: pytest.MonkeyPatch, module: ModuleType, cluster: Cluster) -> None:
    """A ``read_session`` that the module opens, whatever URI it has, is one of the cluster's."""

    @asynccontextmanager
    async def session(*wanted: object) -> AsyncIterator[tuple[object, object]]:
        yield cluster.store, None

    async def manager(store: object, uri: object) -> LedgerManager:
        return LedgerManager(cluster.store, ROOT, Layout.HIERARCHICAL)

    monkeypatch.setattr(module, "read_session", session)
    monkeypatch.setattr(LedgerManager, "open", manager)


async def look(
    cluster: Cluster, level: Level = Level.FULL, ledger_id: int = LEDGER, **changes: Any
) -> LedgerVerdict:
    """The first look alone."""
    verdict = await look_at(await executor(cluster, options(level, **changes)), ledger_id)
    assert verdict is not None, ledger_id
    return verdict


async def look_twice(
    cluster: Cluster, level: Level = Level.FULL, ledger_id: int = LEDGER, **changes: Any
) -> LedgerVerdict | None:
    """As a run does: what seems wrong is looked at again. None: the ledger is gone."""
    first = await look_at(await executor(cluster, options(level, **changes)), ledger_id)
    if first is None or not first.seems_wrong:
        return first
    return await look_again(await executor(cluster, options(level, **changes)), first)


async def look_at_many(
    cluster: Cluster, ledger_ids: Sequence[int], level: Level = Level.FULL, **changes: Any
) -> dict[int, LedgerVerdict]:
    """First looks at all of them."""
    found: dict[int, LedgerVerdict] = {}

    async def tell(verdict: LedgerVerdict) -> None:
        assert verdict.ledger_id not in found, verdict
        found[verdict.ledger_id] = verdict

    wanted = options(level, **changes)
    made = await executor(cluster, wanted)
    await look_at_all(made, ledger_ids, look_at, tell, at_once=wanted.ledgers_at_once)
    return found


def told(verdict: LedgerVerdict | None) -> tuple[Grade, tuple[Finding, ...]]:
    assert verdict is not None
    return verdict.grade, verdict.findings


def replace_payload(cluster: Cluster, bookie: BookieId, entry_id: int, **changes: Any) -> None:
    """Another entry with a right digest, in place of the one that was written."""
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
    """That many copies of the entry, on the first bookies of its write set; which."""
    bookies = list(named_by(metadata, entry_id))[:copies]
    for bookie in bookies:
        cluster.bookie(bookie).lose(LEDGER, entry_id)
    return bookies
