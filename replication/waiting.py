"""Why a marked ledger is not being repaired now: notes that all nodes and commands can read.

One znode a ledger, ``<ur>/bookmender/waiting/<ledger id>``, written by the worker that put the ledger
aside and deleted when it is done. A note without a mark means nothing: readers skip it, and an idle
worker deletes it.
"""

import json
from dataclasses import dataclass

from ledgers.errors import NodeExistsError, NoNodeError
from ledgers.store import ANY_VERSION, Create, Delete, MetadataStore, MultiFailed, SetData
from replication.batching import Batcher
from replication.own_state import read_json, waiting_path
from replication.plan import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingNote:
    """``since_ms``: wall-clock time of the writing node, for people. ``node``: its host."""

    ledger_id: int
    reason: Reason
    detail: str
    node: str
    since_ms: int

    def to_json(self) -> bytes:
        record = {
            "version": 1,
            "ledger_id": self.ledger_id,
            "reason": self.reason.value,
            "detail": self.detail,
            "node": self.node,
            "since_ms": self.since_ms,
        }
        return json.dumps(record).encode()


class WaitingNotes:
    """The notes of all nodes."""

    def __init__(self, store: MetadataStore, ur: str) -> None:
        self._store = store
        self._ur = ur

    async def ledger_ids(self) -> set[int]:
        """Ledgers that have a note."""
        try:
            names = await self._store.children(waiting_path(self._ur))
        except NoNodeError:
            return set()
        return {int(name) for name in names if name.isdecimal()}

    async def read(self, ledger_id: int) -> WaitingNote | None:
        """None when there is none, or a later release wrote it in a way that we cannot read."""
        record = await read_json(self._store, waiting_path(self._ur, ledger_id))
        if record is None:
            return None
        try:
            return WaitingNote(
                ledger_id=ledger_id,
                reason=Reason(record["reason"]),
                detail=str(record["detail"]),
                node=str(record["node"]),
                since_ms=int(record["since_ms"]),
            )
        except (KeyError, ValueError, TypeError):
            return None


class WaitingNotesWriter(WaitingNotes):
    """The notes, for a worker: ``batcher``'s guards prove its session (rule S3)."""

    def __init__(self, store: MetadataStore, batcher: Batcher, ur: str) -> None:
        super().__init__(store, ur)
        self._batcher = batcher

    async def write(self, note: WaitingNote) -> None:
        path, data = waiting_path(self._ur, note.ledger_id), note.to_json()
        if not await self._commit(Create(path=path, data=data)):
            await self._commit(SetData(path=path, data=data, version=ANY_VERSION))

    async def delete(self, ledger_id: int) -> None:
        await self._commit(Delete(path=waiting_path(self._ur, ledger_id)))

    async def _commit(self, operation: Create | SetData | Delete) -> bool:
        """False when the note was there, or gone, already: another node's hand."""
        try:
            await self._batcher.commit([operation])
        except MultiFailed as failure:
            if not isinstance(failure.cause, NodeExistsError | NoNodeError):
                raise failure.cause from failure
            return False
        return True
