"""Writes a ledger: creates it, adds entries, replaces bookies that fail, closes it.

``LedgerWriter`` promises that every entry whose ``add`` returned stays readable: the entry, and all
entries before it, are on A bookies that the metadata names. The writer stops for good when another
client recovers or closes the ledger. ``appending`` sends the entries; ``recovery`` ends a ledger whose
writer is gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
"""What fits with its headers into a frame that bookies take by default, over either protocol."""
METADATA_TRIES_MAX = 10
"""Compare-and-sets of one step, before the writer gives up."""
STRAGGLERS_S = 5.0
"""How long a writer that has ended waits for adds beyond the A that its acknowledgements needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOptions:
    """What a new ledger is to be like.

    ``metadata_version``: 2 or 3. ``has_ctime``: whether the metadata tells when it was created
    (BookKeeper's ``storeSystemTimeAsLedgerCreationTime``).
    """

    ensemble_size: int = 3
    write_quorum: int = 2
    ack_quorum: int = 2
    digest_type: DigestType = DigestType.CRC32C
    password: bytes = b""
    custom: tuple[tuple[str, bytes], ...] = ()
    metadata_version: int = 3
    has_ctime: bool = False

    def __post_init__(self) -> None:
        assert self.metadata_version in (2, 3), self


class LedgerWriter:
    """The one writer of a ledger that it created. For the tasks of one loop.

    Leaving the ``create`` block waits a while for the copies that no acknowledgement needed, so
    that an entry is on W bookies where it can be. Without ``close`` it abandons the ledger: it
    stays open, and its end is for a recovery to find.
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
        """A new ledger and its writer, as an asynchronous context. Raises as ``create_ledger``."""
        versioned = await create_ledger(
            options,
            manager=manager,
            pool=pool,
            clock=clock,
            random=random,
            ledger_id=ledger_id,
        )
        async with task_scope() as scope:
            writer = cls(
                versioned,
                manager=manager,
                bookies=bookies,
                pool=pool,
                clock=clock,
                scope=scope,
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
        """Entries get their ids in the order in which they were let in."""
        self._metadata_turn = asyncio.Lock()
        """Guards ``_versioned``: one compare-and-set of ours at a time."""

    @property
    def ledger_id(self) -> int:
        return self._versioned.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        """As this writer last read or wrote it."""
        return self._versioned.metadata

    @property
    def lac(self) -> int:
        """The last entry that is acknowledged, -1 if none."""
        return self._appender.confirmed

    async def add(self, payload: bytes) -> int:
        """Add an entry and wait until it is acknowledged; its id."""
        return await (await self.send(payload))

    async def send(self, payload: bytes) -> asyncio.Future[int]:
        """Add an entry; its id to come. Waits only while too much is unacknowledged.

        Here or in the future: FencedError or LedgerClosedError once somebody else recovers or
        closes the ledger, UnavailableError when the bookies to write to run out; then no further
        entry is taken, and whether this one is stored is for ``close`` or a recovery to decide.
        RejectedError when it is larger than ``PAYLOAD_BYTES_MAX``; that ends nothing.
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
        """End the ledger after its last acknowledged entry; what is not acknowledged yet fails.

        Also while somebody recovers it, who then adopts this end. Raises LedgerClosedError when it
        was closed at another end already.
        """
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
        """Delete the ledger's metadata; bookies collect the entries in their own time."""
        self._appender.fail(LedgerClosedError("the writer deleted the ledger"))
        async with self._metadata_turn:
            await self._manager.delete(self.ledger_id, version=self._versioned.version)

    async def _record_change(self, segment: Segment) -> None:
        """Write a change of the ensemble to the metadata, before anything rests on it."""
        async with self._metadata_turn:
            before = self.metadata.last_segment
            for _ in range(METADATA_TRIES_MAX):
                changed = changed_by_writer(self.metadata, segment, before=before)
                if changed == self.metadata or await self._try_to_write(changed):
                    return
        raise UnavailableError("the metadata kept changing", ledger_id=self.ledger_id)

    async def _try_to_write(self, metadata: LedgerMetadata) -> bool:
        """Whether it was written; if not, the metadata has been read again."""
        try:
            self._versioned = await self._manager.write(
                self.ledger_id, metadata, read_as=self._versioned
            )
        except (ConflictError, UnknownOutcomeError):
            self._versioned = await self._manager.read(self.ledger_id)
            return False
        return True

    def _confirmed_length(self) -> int:
        """The ledger's length up to the LAC. Forgets those before."""
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
    """Make an open ledger without entries. ``ledger_id`` None: the cluster's next free one.

    Raises NotEnoughBookiesError; NodeExistsError when the id that was asked for is taken.
    """
    metadata = await _metadata(options, pool=pool, clock=clock, random=random)
    for _ in range(TRIES_MAX):
        candidate_id = await manager.new_ledger_id() if ledger_id is None else ledger_id
        try:
            return await manager.create(candidate_id, metadata)
        except (NodeExistsError, UnknownOutcomeError) as error:
            ours = await _ours(candidate_id, metadata, manager)
            if ours is not None:
                return ours
            if ledger_id is not None and isinstance(error, NodeExistsError):
                raise
    raise UnavailableError("no free ledger id was found", attempts=TRIES_MAX)


async def _metadata(
    options: LedgerOptions, *, pool: BookiePool, clock: Clock, random: Random
) -> LedgerMetadata:
    ensemble = pool.placement.choose_ensemble(
        await pool.writable(),
        options.ensemble_size,
        write_quorum=options.write_quorum,
        ack_quorum=options.ack_quorum,
    )
    return LedgerMetadata(
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


async def _ours(
    ledger_id: int, metadata: LedgerMetadata, manager: LedgerManager
) -> VersionedMetadata | None:
    """The ledger, if it is the one that we made with a create whose reply was lost."""
    if metadata.c_token is None:
        return None
    try:
        found = await manager.read(ledger_id)
    except NoSuchLedgerError:
        return None
    return found if found.metadata.c_token == metadata.c_token else None


def changed_by_writer(
    metadata: LedgerMetadata, segment: Segment, *, before: Segment
) -> LedgerMetadata:
    """The metadata with the writer's new ensemble; the same, if a lost write had got through.

    ``before``: the last segment that the writer wrote to. Raises LedgerClosedError when the ledger
    is no longer open, ConflictError when somebody else changed the ensemble: then entries may be
    acknowledged by bookies that the metadata does not name.
    """
    if metadata.state is not LedgerState.OPEN:
        raise LedgerClosedError("the ledger is being recovered or was closed by somebody else")
    last = metadata.last_segment
    changed = with_ensemble(metadata, segment) if last == before else metadata
    if changed.last_segment.ensemble != segment.ensemble:
        raise ConflictError("somebody else changed the ensemble of an open ledger")
    return changed


def closed_by_writer(
    metadata: LedgerMetadata, *, last_entry_id: int, length: int
) -> LedgerMetadata:
    """The metadata closed at the writer's end; the same, if it says so already.

    Raises LedgerClosedError when somebody else closed it elsewhere.
    """
    if not metadata.is_closed:
        return metadata.closed(last_entry_id=last_entry_id, length=length)
    if (metadata.last_entry_id, metadata.length) != (last_entry_id, length):
        raise LedgerClosedError(
            "somebody else closed the ledger at another end",
            last_entry_id=metadata.last_entry_id,
            length=metadata.length,
        )
    return metadata
