"""Writes a ledger: creates it, adds entries, replaces bookies that fail, closes it.

``LedgerWriter`` promises that every entry whose ``add`` returned stays readable: the entry, and all
entries before it, are on A bookies that the metadata names. The writer stops for good when another
client recovers or closes the ledger. ``appending`` sends the entries; ``recovery`` ends a ledger
whose writer is gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random

from ledgers.appending import BookiePool, QuorumAppender, with_ensemble
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.errors import (
    ConflictError,
    LedgerClosedError,
    NodeExistsError,
    NoSuchLedgerError,
    RejectedError,
    UnavailableError,
    UnknownOutcomeError,
)
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import LAC_NONE, DigestType, LedgerMetadata, LedgerState, Segment
from ledgers.reading import ledger_digest
from ledgers.tasks import TaskScope, task_scope

TRIES_MAX = 10
PAYLOAD_BYTES_MAX = 5 * 1024 * 1024 - 1024
"""The largest payload that fits, with its headers, into a frame of bookies' default size limit."""
METADATA_TRIES_MAX = 10
"""Attempts at one compare-and-set before the writer gives up."""
STRAGGLERS_S = 5.0
"""Time that a writer waits at its end for copies beyond the ack quorum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOptions:
    """The properties of a new ledger. ``metadata_version``: 2 or 3. ``has_ctime``: whether it
    contains its creation time (``storeSystemTimeAsLedgerCreationTime``)."""

    ensemble_size: int = 3
    write_quorum: int = 2
    ack_quorum: int = 2
    digest_type: DigestType = DigestType.CRC32C
    password: bytes = field(default=b"", repr=False)
    custom: tuple[tuple[str, bytes], ...] = ()
    metadata_version: int = 3
    has_ctime: bool = False

    def __post_init__(self) -> None:
        assert self.metadata_version in (2, 3), self


class LedgerWriter:
    """The only writer of a ledger, which it created. Used by the tasks of one event loop.

    Leaving the ``create`` block waits up to ``STRAGGLERS_S`` for copies beyond the ack quorum, so
    that entries are on W bookies if possible. Without ``close`` the ledger stays open, and a
    recovery must find its end.
    """

    @classmethod
    @asynccontextmanager
    async def create(
        cls,
        options: LedgerOptions,
        *,
        manager: LedgerManager,
        bookies: Bookies,
        pool: BookiePool,
        clock: Clock,
        random: Random,
        ledger_id: int | None = None,
    ) -> AsyncIterator[LedgerWriter]:
        """Create a ledger and yield its writer. Raises the errors of ``create_ledger``."""
        versioned = await create_ledger(
            options, manager=manager, pool=pool, clock=clock, random=random, ledger_id=ledger_id
        )
        async with task_scope() as scope:
            writer = cls(
                versioned, manager=manager, bookies=bookies, pool=pool, clock=clock, scope=scope
            )
            yield writer
            await writer._appender.settle(STRAGGLERS_S)

    def __init__(
        self,
        versioned: VersionedMetadata,
        *,
        manager: LedgerManager,
        bookies: Bookies,
        pool: BookiePool,
        clock: Clock,
        scope: TaskScope,
    ) -> None:
        self._versioned, self._manager = versioned, manager
        self._digest = ledger_digest(versioned.metadata)
        self._appender = QuorumAppender(
            versioned.metadata,
            bookies=bookies,
            pool=pool,
            clock=clock,
            scope=scope,
            master_key=self._digest.master_key,
            confirmed=LAC_NONE,
            is_recovery=False,
            on_change=self._record_change,
        )
        self._next_entry_id, self._length = 0, 0
        self._lengths = deque([(LAC_NONE, 0)])
        """Entry id and ledger length, from the last confirmed entry on."""
        self._turn = asyncio.Lock()
        """Gives entries their ids in the order of the calls."""
        self._metadata_turn = asyncio.Lock()
        """Guards ``_versioned``: one compare-and-set at a time."""

    @property
    def ledger_id(self) -> int:
        return self._versioned.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        """The metadata that this writer read or wrote last."""
        return self._versioned.metadata

    @property
    def lac(self) -> int:
        """The last acknowledged entry; -1 if there is none."""
        return self._appender.confirmed

    async def add(self, payload: bytes) -> int:
        """Add an entry, wait until it is acknowledged, and return its id."""
        return await (await self.send(payload))

    async def send(self, payload: bytes) -> asyncio.Future[int]:
        """Add an entry and return the future of its id. Waits while too much is unacknowledged.

        The call or the future raises FencedError or LedgerClosedError if another client took over,
        UnavailableError if too few bookies are left. Then the writer accepts no more entries.
        Raises RejectedError above ``PAYLOAD_BYTES_MAX``; the writer can go on.
        """
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise RejectedError("the payload is too large", payload_bytes=len(payload))
        async with self._turn:
            await self._appender.wait_for_room(len(payload))
            entry_id, length = self._next_entry_id, self._length + len(payload)
            acknowledged = self._appender.add(
                entry_id,
                self._digest.pack(
                    ledger_id=self.ledger_id,
                    entry_id=entry_id,
                    lac=self.lac,
                    length=length,
                    payload=payload,
                ),
            )
            self._next_entry_id, self._length = entry_id + 1, length
            self._lengths.append((entry_id, length))
            self._confirmed_length()
            return acknowledged

    async def close(self) -> VersionedMetadata:
        """Close the ledger after its last acknowledged entry; the others fail. A recovery at the
        same time adopts this end. Raises LedgerClosedError if the ledger was closed with another
        end."""
        self._appender.fail(LedgerClosedError("the writer closed the ledger"))
        async with self._metadata_turn:
            for _ in range(METADATA_TRIES_MAX):
                closed = closed_by_writer(
                    self.metadata, last_entry_id=self.lac, length=self._confirmed_length()
                )
                if closed == self.metadata or await self._try_to_write(closed):
                    return self._versioned
        raise UnavailableError("the metadata kept changing", ledger_id=self.ledger_id)

    async def delete(self) -> None:
        """Delete the metadata. The bookies delete the entries later (garbage collection)."""
        self._appender.fail(LedgerClosedError("the writer deleted the ledger"))
        async with self._metadata_turn:
            await self._manager.delete(self.ledger_id, version=self._versioned.version)

    async def _record_change(self, segment: Segment) -> None:
        """Write an ensemble change to the metadata. No entry is confirmed before this."""
        async with self._metadata_turn:
            before = self.metadata.last_segment
            for _ in range(METADATA_TRIES_MAX):
                changed = changed_by_writer(self.metadata, segment, before=before)
                if changed == self.metadata or await self._try_to_write(changed):
                    return
        raise UnavailableError("the metadata kept changing", ledger_id=self.ledger_id)

    async def _try_to_write(self, metadata: LedgerMetadata) -> bool:
        """Return True if the metadata was written. Otherwise it was read again."""
        try:
            self._versioned = await self._manager.write(
                self.ledger_id, metadata, read_as=self._versioned
            )
        except (ConflictError, UnknownOutcomeError):
            self._versioned = await self._manager.read(self.ledger_id)
            return False
        return True

    def _confirmed_length(self) -> int:
        """Return the ledger's length up to the LAC, and forget the lengths before it."""
        while len(self._lengths) > 1 and self._lengths[1][0] <= self.lac:
            self._lengths.popleft()
        return self._lengths[0][1]


async def create_ledger(
    options: LedgerOptions,
    *,
    manager: LedgerManager,
    pool: BookiePool,
    clock: Clock,
    random: Random,
    ledger_id: int | None = None,
) -> VersionedMetadata:
    """Create an open ledger without entries. ``ledger_id`` None: the next free id of the cluster.
    Raises NotEnoughBookiesError. Raises NodeExistsError if the given id is in use."""
    ensemble = pool.placement.choose_ensemble(
        await pool.writable(),
        options.ensemble_size,
        write_quorum=options.write_quorum,
        ack_quorum=options.ack_quorum,
    )
    metadata = LedgerMetadata(
        metadata_version=options.metadata_version,
        ensemble_size=options.ensemble_size,
        write_quorum=options.write_quorum,
        ack_quorum=options.ack_quorum,
        digest_type=options.digest_type,
        password=options.password,
        ctime_ms=clock.wall_ms() if options.has_ctime else None,
        c_token=random.getrandbits(63) if options.metadata_version == 3 else None,
        custom=options.custom,
        segments=(Segment(first_entry_id=0, ensemble=ensemble),),
    )
    for _ in range(TRIES_MAX):
        candidate_id = await manager.new_ledger_id() if ledger_id is None else ledger_id
        try:
            return await manager.create(candidate_id, metadata)
        except (NodeExistsError, UnknownOutcomeError) as error:
            # Our own create may have made it, if only the reply was lost.
            if metadata.c_token is not None:
                with suppress(NoSuchLedgerError):
                    found = await manager.read(candidate_id)
                    if found.metadata.c_token == metadata.c_token:
                        return found
            if ledger_id is not None and isinstance(error, NodeExistsError):
                raise
    raise UnavailableError("no free ledger id was found", attempts=TRIES_MAX)


def changed_by_writer(
    metadata: LedgerMetadata, segment: Segment, *, before: Segment
) -> LedgerMetadata:
    """Return the metadata with the writer's new ensemble, which it may have already after a lost
    reply. ``before``: the last segment that the writer wrote to.

    Raises LedgerClosedError if the ledger is not open, ConflictError if another client changed the
    ensemble: then bookies that the metadata does not name may have acknowledged entries.
    """
    if metadata.state is not LedgerState.OPEN:
        raise LedgerClosedError("another client is recovering the ledger, or has closed it")
    last = metadata.last_segment
    changed = with_ensemble(metadata, segment) if last == before else metadata
    if changed.last_segment.ensemble != segment.ensemble:
        raise ConflictError("another client changed the ensemble of an open ledger")
    return changed


def closed_by_writer(
    metadata: LedgerMetadata, *, last_entry_id: int, length: int
) -> LedgerMetadata:
    """Return the metadata closed at the writer's end; unchanged if it is closed there already.
    Raises LedgerClosedError if another client closed the ledger with another end."""
    if not metadata.is_closed:
        return metadata.closed(last_entry_id=last_entry_id, length=length)
    if (metadata.last_entry_id, metadata.length) != (last_entry_id, length):
        raise LedgerClosedError(
            "another client closed the ledger with another end",
            last_entry_id=metadata.last_entry_id,
            length=metadata.length,
        )
    return metadata
