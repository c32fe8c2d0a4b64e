"""The chain: the znode that says whether the feed is on, and which ledgers it consists of.

The chain changes only by compare-and-set. A leader's write also proves its leadership (rule S9).
Readers follow the znode.

No ledger of the feed is ever forgotten. A ledger is named here before it is created, and until it
is deleted:

1. ``segments`` names the ledgers of the log and the bases, in order. The id is reserved and written
   here, and then the ledger is created with exactly this id.
   A second write says that it was created; only then the first checkpoint follows. So if a ledger
   does not exist, this tells whether checkpoints are lost with it.
2. ``unfinished`` names a base that is being written. When it is complete, it becomes a segment.
3. ``deleting`` names ledgers that are no longer needed. The leader deletes them, and then removes
   their ids from the list.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import islice, pairwise, takewhile

from checkpoints.errors import FeedChangedError
from checkpoints.model import CheckpointId, LogId
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    UnavailableError,
)
from ledgers.store import MetadataStore, MultiFailed, SetData, Stat
from replication.records import Count, Record, Stored, TimeMs, read_stored
from replication.transactions import Batcher
from replication.znodes import ClusterPaths, ensure_znode

TRIES_MAX = 5
RETENTION_DEFAULT_S = 7 * 86_400
SEGMENT_BYTES_MIN = 80
"""By how much the chain at least becomes smaller when a log ledger is dropped from it."""


class Kind(enum.Enum):
    LOG = "log"
    BASE = "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A ledger of the feed.

    ``previous_id``: of a log, the ``previous_id`` of its first checkpoint; of a base, the id of the
    last checkpoint before the base was begun. ``begun_ms``: wall clock.
    """

    ledger_id: Count
    kind: Kind
    previous_id: Count
    begun_ms: TimeMs
    size_bytes: Count = 0
    """Size of a base; 0 for a log."""
    is_created: bool = False
    """True if the ledger exists, or did. A log without it has no checkpoint."""

    @property
    def log_id(self) -> LogId:
        return LogId(self.ledger_id, self.begun_ms, self.previous_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedChain(Record):
    """The feed. ``generation``: grows each time that the feed is enabled; checkpoints of different
    generations have nothing in common. ``retention_s``: how long log ledgers are kept."""

    is_enabled: bool
    generation: Count
    changed_ms: TimeMs
    by: str = ""
    """Who enabled or disabled the feed."""
    retention_s: Count = RETENTION_DEFAULT_S
    segments: tuple[Segment, ...] = ()
    unfinished: tuple[Count, ...] = ()
    deleting: tuple[Count, ...] = ()
    lost_ledger_id: Count | None = None
    """The ledger whose loss made the leader begin this generation; None: an operator did."""
    renewed_ms: TimeMs = 0
    """When a node began this generation, wall clock; 0: an operator did."""

    @property
    def is_after_restore(self) -> bool:
        """True if a node began this generation because ZooKeeper was restored from a backup."""
        return self.renewed_ms > 0 and self.lost_ledger_id is None

    @property
    def logs(self) -> tuple[Segment, ...]:
        """The ledgers of the log, oldest first."""
        return tuple(segment for segment in self.segments if segment.kind is Kind.LOG)

    @property
    def base(self) -> Segment | None:
        """The newest base."""
        bases = [segment for segment in self.segments if segment.kind is Kind.BASE]
        return bases[-1] if bases else None

    def log_of(self, checkpoint_id: CheckpointId) -> LogId | None:
        """Return which ledger of the log has this checkpoint; None if the chain names none."""
        begun = [each for each in self.logs if each.previous_id < checkpoint_id]
        return begun[-1].log_id if begun else None

    def knows(self, log_id: LogId | None) -> bool:
        """Return False if a ledger of the log that had a checkpoint is not named, and retention
        cannot have deleted it. Then ZooKeeper was restored from an older backup.

        Retention deletes the oldest ledgers. What followed began after their checkpoints.
        """
        logs = self.logs
        if log_id is None or not self.is_enabled or log_id in [each.log_id for each in logs]:
            return True
        return bool(logs) and log_id.previous_id < logs[0].previous_id

    def change_error(self) -> FeedChangedError:
        """Return the error for a client of an earlier generation than this."""
        if self.is_after_restore:
            return FeedChangedError(
                "the feed began again, because ZooKeeper was restored from a backup"
            )
        if self.lost_ledger_id is None:
            return FeedChangedError("the feed was disabled and enabled again")
        error = FeedChangedError(
            "the feed began again after a loss", lost_ledger_id=self.lost_ledger_id
        )
        error.lost_ledger_id = self.lost_ledger_id
        return error

    def without(self, ledger_ids: Collection[int]) -> FeedChain:
        """Return the chain without these segments. The leader deletes them."""
        kept = tuple(each for each in self.segments if each.ledger_id not in ledger_ids)
        gone = [each.ledger_id for each in self.segments if each.ledger_id in ledger_ids]
        return replace(self, segments=kept, deleting=(*self.deleting, *gone))

    def with_segment(self, segment: Segment) -> FeedChain:
        """Return the chain with another log ledger at its end, or with a complete base. The leader
        deletes earlier bases."""
        is_base = segment.kind is Kind.BASE
        old = [each.ledger_id for each in self.segments if is_base and each.kind is Kind.BASE]
        chain = self.without(old)
        return replace(
            chain,
            segments=(*chain.segments, segment),
            unfinished=tuple(i for i in chain.unfinished if i != segment.ledger_id),
        )

    def with_created(self, ledger_id: int) -> FeedChain:
        """Return the chain that says that this log ledger was created."""
        segments = (
            replace(each, is_created=True) if each.ledger_id == ledger_id else each
            for each in self.segments
        )
        return replace(self, segments=tuple(segments))

    def with_unfinished(self, ledger_id: int) -> FeedChain:
        """Return the chain with a base that is going to be written. Others are given up."""
        return replace(self, unfinished=(ledger_id,), deleting=(*self.deleting, *self.unfinished))

    def retained(self, now_ms: int) -> FeedChain:
        """Return the chain without log ledgers that neither the retention nor the base needs.

        A log ledger is needed while it may have a checkpoint that is younger than the retention,
        or one that is not in the base. Its end is where the next log ledger begins.
        """
        base, logs = self.base, self.logs
        if base is None:
            return self

        def is_old(pair: tuple[Segment, Segment]) -> bool:
            following = pair[1]
            return (
                following.previous_id <= base.previous_id
                and following.begun_ms + self.retention_s * 1000 <= now_ms
            )

        # Up to the first that is kept: clocks may step back, and the log must have no gap.
        return self.without([each.ledger_id for each, _ in takewhile(is_old, pairwise(logs))])

    def without_lost(self, ledger_id: int) -> FeedChain:
        """Return the chain without this log ledger and the earlier ones, as retention would drop
        them. The base must contain them."""
        ids = [each.ledger_id for each in self.logs]
        return self.without(ids[: ids.index(ledger_id) + 1] if ledger_id in ids else ())

    def within(self, bytes_max: int) -> FeedChain:
        """Return the chain without the oldest log ledgers if it has more than ``bytes_max`` bytes.

        Clients that need them are told, as after the end of the retention. Log ledgers that are not
        in the base stay, so the chain may remain too large until another base is written.
        """
        excess_bytes, base = len(self.to_json()) - bytes_max, self.base
        if excess_bytes <= 0 or base is None:
            return self
        in_base = takewhile(
            lambda pair: pair[1].previous_id <= base.previous_id, pairwise(self.logs)
        )
        dropped = [each for each, _ in islice(in_base, -(-excess_bytes // SEGMENT_BYTES_MIN))]
        return self.without_lost(dropped[-1].ledger_id) if dropped else self

    def enabled(
        self, *, now_ms: int, by: str, retention_s: int, generation_min: int = 0
    ) -> FeedChain:
        """Return the chain of a new feed.

        ``generation_min``: a number that grows, such as the time. If the chain was lost, the count
        of generations was too, and receipts of the lost feed must not count for this one.
        """
        return replace(
            self.disabled(now_ms=now_ms, by=by),
            is_enabled=True,
            generation=max(self.generation + 1, generation_min),
            retention_s=retention_s,
            lost_ledger_id=None,
            renewed_ms=0,
        )

    def renewed(
        self, *, now_ms: int, lost_ledger_id: int | None = None, generation_min: int = 0
    ) -> FeedChain:
        """Return the chain of a new feed, because checkpoints or the base were lost with this
        ledger; None: because ZooKeeper was restored from a backup. It stays the order of the
        operator who enabled the feed.

        A restored chain may be older than the last generation that clients followed. The time is
        a later generation than any.
        """
        fresh = self.enabled(
            now_ms=self.changed_ms,
            by=self.by,
            retention_s=self.retention_s,
            generation_min=max(generation_min, now_ms // 1000),
        )
        return replace(fresh, lost_ledger_id=lost_ledger_id, renewed_ms=now_ms)

    def disabled(self, *, now_ms: int, by: str) -> FeedChain:
        """Return the chain without feed. All its ledgers are deleted by the leader."""
        gone = (*(segment.ledger_id for segment in self.segments), *self.unfinished)
        return replace(
            self,
            is_enabled=False,
            changed_ms=now_ms,
            by=by,
            segments=(),
            unfinished=(),
            deleting=(*self.deleting, *gone),
        )


NO_FEED = FeedChain(is_enabled=False, generation=0, changed_ms=0)


async def read_chain(store: MetadataStore, paths: ClusterPaths) -> Stored[FeedChain]:
    """Raises UnavailableError."""
    return await read_stored(store, paths.feed, FeedChain.parse)


class ChainWriter:
    """Changes the chain as leader."""

    def __init__(self, store: MetadataStore, batcher: Batcher, paths: ClusterPaths) -> None:
        self._store, self._batcher, self._paths = store, batcher, paths
        self.bytes_max = store.request_bytes_max // 2
        """Size from which ``change`` drops log ledgers. Beyond twice the size, ZooKeeper accepts no
        write, and the feed would stall."""

    async def read(self) -> FeedChain:
        """Return the chain. Raises CorruptionError or UnauthorizedError if it is unreadable,
        UnavailableError."""
        return _readable(await read_chain(self._store, self._paths))

    async def change(
        self, change: Callable[[FeedChain], FeedChain], *, generation: int
    ) -> tuple[FeedChain, int]:
        """Replace the chain by ``change`` of it, and return it and the zxid of the write. Writes
        even if nothing changes.

        The reply proves that the session has seen every event up to this zxid. Raises what ``read``
        and ``Batcher.send`` raise, UnknownOutcomeError, and FeedChangedError.
        """
        for _ in range(TRIES_MAX):
            await self._store.sync(self._paths.feed)
            stored = await read_chain(self._store, self._paths)
            before = _readable(stored)
            if not before.is_enabled or before.generation != generation:
                raise FeedChangedError("the feed was disabled, or began again")
            after = change(before).within(self.bytes_max)
            assert stored.stat is not None
            try:
                zxid = await self._put(after, version=stored.stat.version)
            except (ConflictError, NoNodeError):
                continue
            return after, zxid
        raise UnavailableError("other clients keep changing the record", path=self._paths.feed)

    async def forget_deleted(self, ledger_ids: frozenset[int]) -> None:
        """Remove deleted ledgers from the list, also while the feed is off."""
        for _ in range(TRIES_MAX):
            stored = await read_chain(self._store, self._paths)
            chain = _readable(stored)
            assert stored.stat is not None
            try:
                left = tuple(i for i in chain.deleting if i not in ledger_ids)
                await self._put(replace(chain, deleting=left), version=stored.stat.version)
            except (ConflictError, NoNodeError):
                continue
            return

    async def _put(self, chain: FeedChain, *, version: int) -> int:
        write = SetData(path=self._paths.feed, data=chain.to_json(), version=version)
        try:
            (stat,) = await self._batcher.send([write])
        except MultiFailed as failure:
            raise failure.cause from failure
        assert isinstance(stat, Stat), stat
        return stat.mzxid


def _readable(stored: Stored[FeedChain]) -> FeedChain:
    if stored.error is not None:
        raise stored.error
    return stored.value or NO_FEED


async def order_change(
    store: MetadataStore, paths: ClusterPaths, change: Callable[[FeedChain], FeedChain]
) -> FeedChain:
    """Change the chain by an operator's order. An unreadable chain is replaced. Its ledgers, which
    cannot be known, remain.

    Raises UnavailableError, ConflictError if others keep changing the chain.
    """
    for _ in range(TRIES_MAX):
        stored = await read_chain(store, paths)
        if stored.error is not None and not isinstance(stored.error, CorruptionError):
            raise stored.error
        after = change(stored.value or NO_FEED)
        try:
            if stored.stat is None:
                await store.create(paths.feed, after.to_json())
            else:
                await store.set(paths.feed, after.to_json(), version=stored.stat.version)
        except NoNodeError:
            await ensure_znode(store, paths.feed.rpartition("/")[0])
        except (ConflictError, NodeExistsError):
            continue
        else:
            return after
    raise ConflictError("other clients keep changing it", path=paths.feed)
