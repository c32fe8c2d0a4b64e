"""Reads the ledgers of the feed, without fencing them.

``FeedLedgers`` reads checkpoints forwards and backwards. ``PublishedVersions`` is what the log
says: the version of each object after the last checkpoint, from the newest base and the log after
it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from checkpoints.chain import FeedChain, Segment
from checkpoints.codec import CheckpointDecoder, completes_checkpoint, decode_page
from checkpoints.model import NO_CHECKPOINT, Checkpoint, CheckpointId, Version, ledger_id_of
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.errors import CorruptionError, DigestMismatchError, NoSuchEntryError
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.reading import LedgerReader, OpenedLedger, find_end

KIND_FIELD = "bookmender-feed-kind"


class FeedLostError(CorruptionError):
    """Checkpoints or a base are lost for good with a ledger of the feed. ``is_certain``: False if
    this follows from what bookies say now: then it is true if they keep saying it."""

    def __init__(self, message: str, *, ledger_id: int, is_certain: bool) -> None:
        super().__init__(message, ledger_id=ledger_id)
        self.ledger_id, self.is_certain = ledger_id, is_certain


@dataclass(frozen=True, slots=True)
class LossGate:
    """Decides which reported losses count: those that are certain, and those that bookies report
    for ``lost_after_s``."""

    lost_after_s: float
    since_s: dict[int, float] = field(default_factory=dict)
    """By ledger id, since when its loss is reported without a break."""

    def counts(self, ledger_id: int, loss: FeedLostError | None, *, now_s: float) -> bool:
        """Return True if this loss of a ledger counts. None: the ledger is not lost."""
        if loss is None:
            self.since_s.pop(ledger_id, None)
            return False
        since_s = self.since_s.setdefault(ledger_id, now_s)
        return loss.is_certain or now_s - since_s >= self.lost_after_s


class FeedLedgers:
    """Reads ledgers of the feed."""

    def __init__(self, manager: LedgerManager, bookies: Bookies, clock: Clock) -> None:
        self._manager, self._bookies, self._clock = manager, bookies, clock

    async def open(self, ledger_id: int) -> OpenedLedger | None:
        """Return the ledger and its LAC; None if it does not exist. Raises UnavailableError."""
        found = await self._manager.find(ledger_id)
        return None if found is None else await self.open_as(found)

    async def open_as(self, versioned: VersionedMetadata) -> OpenedLedger:
        """Ask for the LAC with known metadata. Raises UnavailableError."""
        return await find_end(versioned, bookies=self._bookies, clock=self._clock)

    async def payloads(
        self,
        opened: OpenedLedger,
        first_entry_id: int,
        last_entry_id: int,
        *,
        is_latest_first: bool = False,
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield entry ids and payloads of a range, inclusive at both ends. Use it within
        ``aclosing``."""
        reader = LedgerReader(
            opened.ledger_id,
            opened.metadata,
            digest=opened.digest,
            bookies=self._bookies,
            clock=self._clock,
        )
        async with aclosing(
            reader.entries(first_entry_id, last_entry_id, is_latest_first=is_latest_first)
        ) as entries:
            async for entry in entries:
                yield entry.entry_id, bytes(entry.payload)

    async def checkpoints(self, opened: OpenedLedger) -> AsyncGenerator[Checkpoint, None]:
        """Yield the checkpoints of a log ledger up to its LAC. Use it within ``aclosing``."""
        decoder = CheckpointDecoder()
        async with aclosing(self.payloads(opened, 0, opened.lac)) as entries:
            async for _, payload in entries:
                checkpoint = decoder.decode(payload)
                if checkpoint is not None:
                    yield checkpoint

    async def checkpoints_backwards(
        self, opened: OpenedLedger
    ) -> AsyncGenerator[tuple[int, Checkpoint], None]:
        """Yield the checkpoints of a log ledger up to its LAC, latest first, each with the id of
        its last entry. Use it within ``aclosing``."""
        parts: list[bytes] = []
        """The entries of the checkpoint whose last part was found, latest first."""
        last_entry_id = -1
        async with aclosing(self.payloads(opened, 0, opened.lac, is_latest_first=True)) as entries:
            async for entry_id, payload in entries:
                is_last = completes_checkpoint(payload)
                if parts and (is_last or not payload):
                    yield last_entry_id, _joined(parts)
                    parts = []
                if is_last:
                    last_entry_id = entry_id
                if is_last or (parts and payload):
                    parts.append(payload)
            if parts:
                yield last_entry_id, _joined(parts)

    async def log_backwards(self, logs: Sequence[Segment]) -> AsyncGenerator[Checkpoint, None]:
        """Yield the checkpoints of these log ledgers, latest first. Use it within ``aclosing``.

        A ledger that does not exist is skipped: retention has deleted it, or the leader is about to
        create it.
        """
        for segment in reversed(logs):
            opened = await self.open(segment.ledger_id)
            if opened is None:
                continue
            async with aclosing(self.checkpoints_backwards(opened)) as checkpoints:
                async for _, checkpoint in checkpoints:
                    yield checkpoint

    async def last_checkpoint(self, opened: OpenedLedger) -> tuple[int, Checkpoint] | None:
        """Return the last complete checkpoint of a log ledger and the id of its last entry."""
        async with aclosing(self.checkpoints_backwards(opened)) as checkpoints:
            async for found in checkpoints:
                return found
        return None


def _joined(parts: list[bytes]) -> Checkpoint:
    """Return the checkpoint of these entries, latest first."""
    decoder = CheckpointDecoder()
    decoded = [decoder.decode(payload) for payload in reversed(parts)]
    checkpoint = decoded[-1]
    assert checkpoint is not None
    return checkpoint


class PublishedVersions:
    """The version of each ledger after the last checkpoint of the log."""

    def __init__(self) -> None:
        self._ids, self._versions = array("q"), array("q")
        """The ledgers in the base, by ascending id, and their versions."""
        self._changed: dict[int, Version] = {}
        """After the base; below 0: deleted at this version."""
        self._changed_ids: list[int] | None = None
        self.log_bytes = 0
        """Payload bytes of the log after the base."""
        self.last_id: CheckpointId = NO_CHECKPOINT
        """The last checkpoint of the log, as far as it was read."""
        self.horizon: CheckpointId = NO_CHECKPOINT
        """Deletions up to this checkpoint are unknown."""

    @classmethod
    async def read(cls, chain: FeedChain, ledgers: FeedLedgers) -> PublishedVersions:
        """Read the newest base, and the log after it; each of its ledgers must have been created.

        Raises UnavailableError. Raises FeedLostError if a ledger or an entry is lost:
        then it is unknown which deletions were published.
        """
        versions = cls()
        base = chain.base
        if base is not None:
            with losses_of(base):
                await versions._read_base(base, ledgers)
        base_id = NO_CHECKPOINT if base is None else base.previous_id
        versions.last_id = versions.horizon = base_id
        if base is None and chain.logs:
            versions.horizon = chain.logs[0].previous_id
        for segment in logs_after(chain, base_id):
            versions.last_id = max(versions.last_id, segment.previous_id)
            opened = await ledgers.open(segment.ledger_id)
            if opened is None:
                raise deleted_error(segment)
            versions.log_bytes += opened.length
            with losses_of(segment):
                async with aclosing(ledgers.checkpoints(opened)) as checkpoints:
                    async for checkpoint in checkpoints:
                        versions.last_id = checkpoint.id
                        if checkpoint.id > base_id:
                            versions.apply(checkpoint)
        return versions

    async def _read_base(self, base: Segment, ledgers: FeedLedgers) -> None:
        opened = await ledgers.open(base.ledger_id)
        if opened is None:
            raise deleted_error(base)
        async with aclosing(ledgers.payloads(opened, 0, opened.lac)) as entries:
            async for _, payload in entries:
                page = decode_page(payload)
                if page is not None:
                    self._ids.extend(page[0])
                    self._versions.extend(page[1])

    def apply(self, checkpoint: Checkpoint) -> None:
        """Add the changes of the next checkpoint."""
        self._changed_ids = None
        for span in checkpoint.spans:
            ledger_id = ledger_id_of(span.key)
            if ledger_id is not None:
                self._changed[ledger_id] = -span.end if span.is_deleted else span.end

    def ledger_ids(self) -> Iterator[int]:
        """Yield the ids of all ledgers that exist, in any order."""
        for ledger_id in self._ids:
            if ledger_id not in self._changed:
                yield ledger_id
        for ledger_id, version in self._changed.items():
            if version > 0:
                yield ledger_id

    @property
    def base(self) -> tuple[array[int], array[int]]:
        """The ids of the ledgers in the base, ascending, and their versions."""
        return self._ids, self._versions

    def changes(self) -> Iterator[tuple[int, Version, bool]]:
        """Yield each ledger that changed after the base, its version, and whether that was its
        deletion."""
        for ledger_id, version in self._changed.items():
            yield ledger_id, abs(version), version < 0

    def between(self, first: int, stop: int | None) -> dict[int, Version]:
        """Return the versions of existing ledgers from ``first`` to before ``stop``; None: to the
        end."""
        if self._changed_ids is None:
            self._changed_ids = sorted(self._changed)
        begin = bisect_left(self._ids, first)
        end = len(self._ids) if stop is None else bisect_left(self._ids, stop)
        found = dict(zip(self._ids[begin:end], self._versions[begin:end], strict=True))
        begin = bisect_left(self._changed_ids, first)
        end = len(self._changed_ids) if stop is None else bisect_left(self._changed_ids, stop)
        for ledger_id in self._changed_ids[begin:end]:
            version = self._changed[ledger_id]
            if version > 0:
                found[ledger_id] = version
            else:
                found.pop(ledger_id, None)
        return found


def deleted_error(segment: Segment) -> FeedLostError:
    """Return the error for a ledger of the feed that was deleted."""
    return FeedLostError(
        "a ledger of the feed was deleted", ledger_id=segment.ledger_id, is_certain=True
    )


@contextmanager
def losses_of(segment: Segment) -> Iterator[None]:
    """Raise FeedLostError if all replicas of an entry say that they have no good copy."""
    try:
        yield
    except (NoSuchEntryError, DigestMismatchError) as error:
        raise FeedLostError(str(error), ledger_id=segment.ledger_id, is_certain=False) from error


def logs_after(chain: FeedChain, checkpoint_id: CheckpointId) -> list[Segment]:
    """Return the log ledgers that may have checkpoints after this one, oldest first."""
    logs = chain.logs
    return [
        segment
        for number, segment in enumerate(logs)
        if number + 1 == len(logs) or logs[number + 1].previous_id > checkpoint_id
    ]
