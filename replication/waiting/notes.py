"""Why a marked ledger is not being repaired now: notes that all nodes and commands can read.

One znode a ledger, ``<ur>/bookmender/waiting/<ledger id>``, written by the worker that put the
ledger aside and deleted when it is done. All nodes keep to what it says of the next try, so that N
nodes do not try N times. A note without a mark means nothing, nor does one that is older than the
mark beside it (Java's workers unmark a ledger and know of no notes): readers skip it, and an idle
worker, or who takes the ledger, deletes it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import structlog

from ledgers.errors import (
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    UnauthorizedError,
)
from ledgers.metadata import BookieId
from ledgers.operations.tasks import gather_in_parts
from ledgers.store import (
    ANY_VERSION,
    Check,
    Create,
    Delete,
    MetadataStore,
    MultiFailed,
    SetData,
)
from replication.cluster.membership import ensure
from replication.cluster.own_state import (
    OPEN_UP,
    ledger_id_of_name,
    names_in,
    parse_record,
    part,
    text,
    texts,
    time_ms,
    waiting_path,
    whole,
)
from replication.queue.batching import Batcher
from replication.queue.locks import guarded_multi
from replication.reasons import Reason
from replication.waiting.world import World

log = structlog.get_logger()

READS_AT_ONCE = 500
LET_GO_TRIES_MAX = 5
"""Whoever writes the note anew so often tries the ledger anyway."""
BINDING_MAX_MS = 86_400_000
"""However far ahead a note sets the next try (a clock may be wrong): after a day somebody looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingNote:
    """What was in the way at the last of ``tries``, and when the next one is due.

    Times are the writing node's wall clock, in milliseconds. ``node``: its host, for people.
    ``since_ms``: of the first try that failed for this reason.
    """

    ledger_id: int
    reason: Reason
    detail: str
    node: str
    since_ms: int
    tries: int = 1
    next_try_ms: int = 0
    """0: at any time, as with the notes of the first releases and while a worker holds the lock."""
    grace_until_ms: int = 0
    """When the grace is over that the ledger waits for under a worker's lock; 0: it does not. Binds
    nobody."""
    world: World | None = None
    """As it was when that try began."""
    bad_sources: frozenset[BookieId] = frozenset()
    """Bookies whose copies were found bad when they were to be copied from: whoever tries it next
    reads them whole."""
    mzxid: int | None = field(default=None, compare=False)
    """Of the znode that it was read from: its last write."""
    written_ms: int | None = field(default=None, compare=False)
    """Likewise, by ZooKeeper's clock."""

    def is_older_than(self, mark_czxid: int) -> bool:
        """Whether it was written before that mark was made, and so of another.

        By its last write: a note that stands is written anew for the next mark. Of a mark it is the
        first: the leader adds bookies to one that stands.
        """
        return self.mzxid is not None and self.mzxid < mark_czxid

    def let_go(self) -> Self:
        """The ledger is to be tried at once, whatever was in the way. What the note tells of bad
        sources stays: who does not know of them takes the ledger for whole by its ends.
        """
        return replace(
            self,
            reason=Reason.LEFT_TO_OTHERS,
            detail=f"to be tried at once: {', '.join(sorted(self.bad_sources))} are to be read whole",
            tries=1,
            next_try_ms=0,
            world=None,
        )

    def wait_ms(self, *, now_ms: int, world: World) -> int:
        """How long the ledger is still to be left alone in such a world; 0: not at all."""
        if self.reason.is_of_this_node or self.world is None:
            return 0
        if world.has_improved_since(self.world, self.reason):
            return 0
        wait_ms = min(max(0, self.next_try_ms - now_ms), BINDING_MAX_MS)
        if self.written_ms is not None:  # else each look would find it binding for a day
            wait_ms = min(wait_ms, max(0, self.written_ms + BINDING_MAX_MS - now_ms))
        return wait_ms

    def is_overtaken(self, *, now_ms: int, world: World) -> bool:
        """Whether the world is a better one than it tells of, so that the ledger is tried before
        its time."""
        if self.reason.is_of_this_node or self.world is None:
            return False
        is_in_grace = self.reason.is_a_grace and now_ms < self.grace_until_ms
        return not is_in_grace and world.has_improved_since(self.world, self.reason)

    def tries_for(self, reason: Reason, *, world: World) -> int:
        """How often it failed in a row for this reason, in a world no worse than this one."""
        if self.reason is not reason or self.world is None:
            return 0
        return 0 if world.has_improved_since(self.world, reason) else self.tries

    def to_json(self) -> bytes:
        record = {
            "version": 2,
            "ledger_id": self.ledger_id,
            "reason": self.reason.value,
            "detail": self.detail,
            "node": self.node,
            "since_ms": self.since_ms,
            "tries": self.tries,
            "next_try_ms": self.next_try_ms,
            "grace_until_ms": self.grace_until_ms,
            "world": None if self.world is None else self.world.to_record(),
            "bad_sources": sorted(self.bad_sources),
        }
        return json.dumps(record).encode()

    @classmethod
    def from_record(cls, ledger_id: int, record: dict[str, Any]) -> Self:
        """Raises CorruptionError on what no release of ours has written, or this one does not
        know."""
        # Version 1 had neither these nor the world, and the first of version 2 no bad sources.
        first = {"tries": 1, "next_try_ms": 0, "grace_until_ms": 0, "bad_sources": []}
        record = {**first, **record}
        has_world = record.get("world") is not None
        return cls(
            ledger_id=ledger_id,
            reason=_reason(text(record, "reason")),
            detail=text(record, "detail"),
            node=text(record, "node"),
            since_ms=time_ms(record, "since_ms"),
            tries=whole(record, "tries"),
            next_try_ms=time_ms(record, "next_try_ms"),
            grace_until_ms=time_ms(record, "grace_until_ms"),
            world=World.from_record(part(record, "world")) if has_world else None,
            bad_sources=frozenset(map(BookieId, texts(record, "bad_sources"))),
        )


def _reason(value: str) -> Reason:
    try:
        return Reason(value)
    except ValueError as error:
        raise CorruptionError("a reason that this release does not know") from error


class WaitingNotes:
    """The notes of all nodes."""

    def __init__(self, store: MetadataStore, ur: str) -> None:
        self._store = store
        self._ur = ur

    async def are_any(self) -> bool:
        """Cheap, where a list of their names may be long."""
        path = waiting_path(self._ur)
        try:
            stat = await self._store.exists(path)
        except UnauthorizedError as error:
            log.warning("record.shut_away", path=path, error=str(error), next_step=OPEN_UP)
            return False
        return stat is not None and stat.child_count > 0

    async def ledger_ids(self) -> set[int]:
        """Ledgers that have a note."""
        names = await names_in(self._store, waiting_path(self._ur))
        return {i for i in map(ledger_id_of_name, names) if i is not None}

    async def read(self, ledger_id: int) -> WaitingNote | None:
        """None when there is none, or a later release wrote it in a way that we cannot read, or
        ACLs shut it away."""
        try:
            data, stat = await self._store.get(waiting_path(self._ur, ledger_id))
            note = WaitingNote.from_record(ledger_id, parse_record(data))
        except (NoNodeError, CorruptionError, UnauthorizedError):
            return None
        return replace(note, mzxid=stat.mzxid, written_ms=stat.mtime_ms)

    async def version(self, ledger_id: int) -> int | None:
        """Of its znode; None where there is none."""
        stat = await self._store.exists(waiting_path(self._ur, ledger_id))
        return None if stat is None else stat.version

    async def read_all(self, ledger_ids: Sequence[int]) -> list[WaitingNote]:
        """Those of the ledgers' notes that can be read, in order."""
        notes = await gather_in_parts(self.read, ledger_ids, at_once=READS_AT_ONCE)
        return [note for note in notes if note is not None]

    async def let_go(
        self, ledger_id: int, *, guards: Sequence[Check], beside: WaitingNote | None = None
    ) -> None:
        """Its note binds nobody any more, and goes unless it tells of bad sources, or ``beside``
        does.

        ``guards``: prove that the caller may (rule S3). Raises LockLostError when they do not.
        """
        path = waiting_path(self._ur, ledger_id)
        for _ in range(LET_GO_TRIES_MAX):
            operation = await self._letting_go(path, ledger_id, beside)
            if operation is None:
                return
            try:
                await guarded_multi(self._store, guards, [operation], ledger_id=ledger_id)
                return
            except MultiFailed as failure:
                if not isinstance(failure.cause, ConflictError | NoNodeError | NodeExistsError):
                    raise failure.cause from failure
                if isinstance(operation, Create) and isinstance(failure.cause, NoNodeError):
                    await ensure(self._store, waiting_path(self._ur))  # somebody deleted it

    async def _letting_go(
        self, path: str, ledger_id: int, beside: WaitingNote | None
    ) -> Create | SetData | Delete | None:
        left, version = beside, ANY_VERSION
        try:
            data, stat = await self._store.get(path)
            version = stat.version
            note = WaitingNote.from_record(ledger_id, parse_record(data))
        except NoNodeError:
            return None if left is None else Create(path=path, data=left.to_json())
        except (CorruptionError, UnauthorizedError):  # it tells nobody anything
            pass
        else:
            if left is not None:
                left = replace(left, bad_sources=left.bad_sources | note.bad_sources)
            elif note.bad_sources:
                left = note.let_go()
        if left is None:
            return Delete(path=path, version=version)
        return SetData(path=path, data=left.to_json(), version=version)


class WaitingNotesWriter(WaitingNotes):
    """The notes, for a worker: ``batcher``'s guards prove its session (rule S3)."""

    def __init__(self, store: MetadataStore, batcher: Batcher, ur: str) -> None:
        super().__init__(store, ur)
        self._batcher = batcher

    async def write(self, note: WaitingNote, *, is_likely_there: bool = False) -> None:
        """In place of what stands there. ``is_likely_there``: spares a request if that is right."""
        path, data = waiting_path(self._ur, note.ledger_id), note.to_json()
        create, change = (
            Create(path=path, data=data),
            SetData(path=path, data=data, version=ANY_VERSION),
        )
        first, second = (change, create) if is_likely_there else (create, change)
        if not (await self._commit(first) or await self._commit(second)):
            # By others' hands, one right after the other; or somebody deleted the directory.
            await ensure(self._store, waiting_path(self._ur))
            await self._commit(create)

    async def delete(self, ledger_id: int, *, version: int = ANY_VERSION) -> None:
        """Nothing happens to one that stands at another version."""
        await self._commit(Delete(path=waiting_path(self._ur, ledger_id), version=version))

    async def _commit(self, operation: Create | SetData | Delete) -> bool:
        """False when the note was there, or gone, already, or is another: another node's hand."""
        try:
            await self._batcher.apply(operation)
        except (NodeExistsError, NoNodeError, ConflictError):
            return False
        return True
