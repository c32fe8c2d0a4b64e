"""Decides when an absent bookie counts as lost. Follows the recovery delay and our own outages.

- A bookie counts as lost when it has been absent for the recovery delay of the cluster, which
  Java's znode ``lostBookieRecoveryDelay`` holds (``RecoveryDelay``). The first leader creates the
  znode from its setting; afterwards the znode decides. Each write takes effect at once, also after
  the znode was deleted. Java's auditor never recovers from a deletion (G29). If the znode cannot be
  read, the last delay that was read stays in force, because a delay that became shorter by mistake
  causes the repair of a healthy bookie's ledgers.
- A bookie in maintenance does not count as absent. Its delay starts at the end of the window, or at
  its departure if that is later. So an operator who ends a window early, or forgot a bookie in it,
  has the same time to act as after any other loss.
- A bookie that is absent right after an outage of our own ZooKeeper connection gets extra time
  (``Outages``). If its session ended in the same outage, it is healthy and returns by itself.
- A new leader continues the absences that the leader before it recorded (``StoredAbsences``). If no
  leader was active for a while, a bookie may have returned and disappeared again unseen, so its
  absence starts over.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import structlog

from auditor.unavailable_ledgers import UnavailableLedgers
from ledgers.clock import Clock
from ledgers.errors import CorruptionError, NodeExistsError, NoNodeError, UnauthorizedError
from ledgers.model import BookieId
from ledgers.store import MetadataStore
from ledgers.tasks import until_answered
from replication import znodes
from replication.records import Count, Record, TimeMs, read_record
from replication.znodes import ClusterPaths

log = structlog.get_logger()

JOINED_MAX_S = 300.0
"""Outages count as one until this long after the first of them began. A bookie absent for longer
has another reason."""
NAMING_MAX_MS = 120_000
"""Maximum age of the counts. Older counts are from an earlier leader: a leader writes them twice in
this time (``AbsenceTracker``)."""
UNSEEN_MAX_MS = 600_000
"""Longest time without an active leader after which a new leader still continues the absences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """The last outage. ``settled_s``: a bookie that has not returned by then is absent for another
    reason.

    Times are monotonic seconds.
    """

    began_s: float = -math.inf
    settled_s: float = -math.inf

    def excuses_until_s(self, since_s: float) -> float:
        """Return until when a bookie absent since ``since_s`` is not lost; -inf if the outage does
        not explain its absence."""
        return self.settled_s if self.began_s <= since_s <= self.settled_s else -math.inf


NO_OUTAGE = Outage()


# --- Lost or not ----------------------------------------------------------------------------------


def still_absent(
    absent_since_s: Mapping[BookieId, float],
    *,
    known: Collection[BookieId],
    available: Collection[BookieId],
    excused: Collection[BookieId] = (),
    now_s: float,
) -> dict[BookieId, float]:
    """Return since when each known bookie is absent. Newly absent bookies start at ``now_s``.

    ``excused``: bookies under maintenance, which do not count as absent.
    """
    return {
        bookie: absent_since_s.get(bookie, now_s)
        for bookie in known
        if bookie not in available and bookie not in excused
    }


def lost_bookies(
    absent_since_s: Mapping[BookieId, float],
    *,
    now_s: float,
    delay_s: float,
    overruled_s: float = -math.inf,
    outage: Outage = NO_OUTAGE,
) -> frozenset[BookieId]:
    """Return the bookies that are absent for at least the recovery delay, or since ``overruled_s``
    or before.

    Times are monotonic seconds. ``overruled_s``: when an operator last asked not to wait any
    longer. ``outage``: the last outage of our own connection.
    """
    assert delay_s >= 0
    return frozenset(
        bookie
        for bookie, since_s in absent_since_s.items()
        if now_s >= _lost_at_s(since_s, delay_s, outage) or since_s <= overruled_s
    )


def excused_until_s(
    absent_since_s: Mapping[BookieId, float],
    *,
    overruled_s: float = -math.inf,
    outage: Outage = NO_OUTAGE,
) -> dict[BookieId, float]:
    """Return, by bookie, the time until which the outage keeps it from counting as lost, for any
    recovery delay. The arguments are those of ``lost_bookies``."""
    return {
        bookie: outage.excuses_until_s(since_s)
        for bookie, since_s in absent_since_s.items()
        if since_s > overruled_s and outage.excuses_until_s(since_s) > -math.inf
    }


def delay_left_s(
    absent_since_s: Mapping[BookieId, float],
    *,
    now_s: float,
    delay_s: float,
    outage: Outage = NO_OUTAGE,
) -> dict[BookieId, float]:
    """Return, by bookie that is not lost yet, the seconds until it counts as lost."""
    lost_at_s = {b: _lost_at_s(since, delay_s, outage) for b, since in absent_since_s.items()}
    return {bookie: at_s - now_s for bookie, at_s in lost_at_s.items() if now_s < at_s}


def _lost_at_s(since_s: float, delay_s: float, outage: Outage) -> float:
    return max(since_s + delay_s, outage.excuses_until_s(since_s))


# --- Outages of our own connection ----------------------------------------------------------------


class Outages:
    """Tracks outages across the sessions of the auditor, because an outage may end a session.
    ``return_s``: the time that bookies have to return."""

    def __init__(self, clock: Clock, *, return_s: float) -> None:
        self._clock = clock
        self._return_s = return_s
        self._began_s: float | None = None
        self._ended = Outage()

    @property
    def last(self) -> Outage:
        """The last outage. An outage that is still going on counts as if it ended now."""
        return self._ended if self._began_s is None else self._ending(self._began_s)

    async def follow(self, store: MetadataStore) -> None:
        """Track the outages of one session. Its start ends the outage that ended the session
        before.

        Raises SessionLostError.
        """
        while True:
            self.end()
            await store.wait_disconnected()
            self.begin()
            await store.wait_connected()

    def begin(self) -> None:
        """Record that the connection is lost. May be called repeatedly.

        If bookies still have time to return from the last outage, the new outage continues it, up
        to ``JOINED_MAX_S`` from its beginning. The reason: a new outage ends the sessions of
        bookies that were about to return.
        """
        if self._began_s is None:
            now_s, last = self._clock.now_s(), self._ended
            is_joined = now_s <= last.settled_s and now_s - last.began_s < JOINED_MAX_S
            self._began_s = last.began_s if is_joined else now_s

    def end(self) -> None:
        """Record that the connection is back. May be called repeatedly."""
        if self._began_s is not None:
            self._ended = self._ending(self._began_s)
            self._began_s = None
            log.info("outage.ended", return_s=self._return_s)

    def _ending(self, began_s: float) -> Outage:
        return Outage(began_s=began_s, settled_s=self._clock.now_s() + self._return_s)


# --- The record for the next leader ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAbsences(Record):
    """The absences as a leader recorded them. Times are wall-clock milliseconds. ``seen_ms``: when
    the leader recorded them.

    ``ledger_counts``: by bookie that is absent for any reason, the number of ledgers that name it,
    for people. ``are_counts_complete``: True if every ledger was counted. ``unavailable``: the
    ledgers with entries whose every copy is on these bookies; None if they were not counted.
    """

    since_ms: Mapping[BookieId, TimeMs] = field(default_factory=dict)
    seen_ms: TimeMs = 0
    ledger_counts: Mapping[BookieId, Count] = field(default_factory=dict)
    are_counts_complete: bool = False
    unavailable: UnavailableLedgers | None = None
    excused_ms: Mapping[BookieId, TimeMs] = field(default_factory=dict)
    """By bookie, until when it does not count as lost because it may return by itself after an
    outage (``Outages``)."""

    def named(self, *, now_ms: int) -> frozenset[BookieId]:
        """Return the absent bookies that ledgers name; none if the counts are too old."""
        if not self.is_fresh(now_ms=now_ms):
            return frozenset()
        return frozenset(bookie for bookie, count in self.ledger_counts.items() if count)

    def named_count(self, bookie: BookieId, *, now_ms: int) -> int | None:
        """Return how many ledgers name the bookie; None if not all ledgers were counted
        recently."""
        is_known = self.are_counts_complete and self.is_fresh(now_ms=now_ms)
        return self.ledger_counts.get(bookie) if is_known else None

    def is_fresh(self, *, now_ms: int) -> bool:
        return now_ms - self.seen_ms <= NAMING_MAX_MS

    @classmethod
    def of(
        cls,
        absent_since_s: Mapping[BookieId, float],
        *,
        now_s: float,
        wall_ms: int,
        ledger_counts: Mapping[BookieId, int] | None = None,
        are_counts_complete: bool = False,
        unavailable: UnavailableLedgers | None = None,
        excused_until_s: Mapping[BookieId, float] | None = None,
    ) -> StoredAbsences:
        def wall(at_s: float) -> int:
            return max(0, wall_ms + round((at_s - now_s) * 1000))

        return cls(
            since_ms={bookie: wall(since_s) for bookie, since_s in absent_since_s.items()},
            seen_ms=wall_ms,
            ledger_counts=ledger_counts or {},
            are_counts_complete=are_counts_complete,
            unavailable=unavailable,
            excused_ms={b: wall(until_s) for b, until_s in (excused_until_s or {}).items()},
        )

    def resumed(self, *, now_s: float, wall_ms: int) -> dict[BookieId, float]:
        """Return since when each bookie is absent, in monotonic seconds of this process.

        The clocks of two hosts may differ: an absence that begins in the future begins now.
        """
        if wall_ms - self.seen_ms > UNSEEN_MAX_MS:
            return {}
        return {
            bookie: now_s - max(0, wall_ms - since_ms) / 1000
            for bookie, since_ms in self.since_ms.items()
        }


# --- The recovery delay ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """The recovery delay in force.

    ``mzxid``: the last write of its znode; 0 if the znode is missing or access is denied.
    """

    delay_s: int
    mzxid: int
    is_stored: bool
    """False: the znode is missing, so ``delay_s`` is the setting, or it cannot be read."""
    refusal: str = ""
    """Why the znode cannot be read, for people; empty if it can be read or is missing."""

    def is_asking_for_audit(self, before: Delay) -> bool:
        """True if the delay was written again unchanged. As with Java (Auditor's
        LostBookieRecoveryDelayChangedCb), this asks to treat absent bookies as lost at once.
        Operators trigger an audit this way. A readable delay after an unreadable one corrects a
        mistake, and asks for nothing."""
        is_written = self.is_stored and self.mzxid != before.mzxid and not before.refusal
        return is_written and self.delay_s == before.delay_s


class RecoveryDelay:
    """Follows the recovery delay. ``current`` is the one in force, after ``read``."""

    def __init__(
        self, store: MetadataStore, paths: ClusterPaths, *, default_s: int, clock: Clock
    ) -> None:
        self._store, self._paths = store, paths
        self._clock = clock
        self._path = paths.recovery_delay
        self._default_s = default_s
        self._is_created = False
        self._last_s: int | None = None
        """The delay that was in force after the last reading; None before the first."""
        self.current = Delay(delay_s=default_s, mzxid=0, is_stored=False)

    async def create(self) -> None:
        """Create the znode from the setting if it is missing. Only a leader does so."""
        data = znodes.recovery_delay_to_bytes(self._default_s)
        with suppress(NodeExistsError):
            await self._store.create(self._path, data, with_parents=True)
            self._is_created = True

    async def read(self) -> None:
        """Read the delay in force, and log it. Raises UnavailableError."""
        self.current = await self._read()
        log_refusal(self.current, self._path)
        is_znodes = self.current.is_stored and not self._is_created
        log.info(
            "recovery_delay.read",
            delay_s=self.current.delay_s,
            source="lostBookieRecoveryDelay" if is_znodes else "setting",
        )

    async def changes(self) -> AsyncGenerator[tuple[Delay, Delay], None]:
        """Yield the delay before and after each write or deletion of the znode. Ends with the
        session.

        If the znode cannot be read, the delay stays as it is.
        """
        async with aclosing(self._store.watch(self._path)) as events:
            async for _ in events:
                now = await until_answered(
                    self._read, event="recovery_delay.read_failed", clock=self._clock
                )
                before, self.current = self.current, now
                if self.current != before:
                    log_refusal(now, self._path)
                    log.info("recovery_delay.changed", delay_s=self.current.delay_s)
                    yield before, self.current

    async def _read(self) -> Delay:
        now = await read_delay(
            self._store, self._paths, default_s=self._default_s, last_s=self._last_s
        )
        self._last_s = now.delay_s
        return now


@dataclass(frozen=True, slots=True, kw_only=True)
class _AuditDelay(Record):
    """The part of the last audit's record (``AuditRecord``) that outlives an unreadable delay."""

    recovery_delay_s: Count = 0


async def read_delay(
    store: MetadataStore, paths: ClusterPaths, *, default_s: int, last_s: int | None = None
) -> Delay:
    """Return the delay in force: ``default_s`` if the znode is missing.

    If the znode cannot be read, ``last_s`` is in force, the last delay that the caller read. A
    caller that read none uses ``default_s`` or the delay of the last audit, whichever is longer.
    """
    mzxid, refusal = 0, ""
    try:
        data, stat = await store.get(paths.recovery_delay)
        mzxid = stat.mzxid
        delay_s = znodes.parse_recovery_delay(data)
        return Delay(delay_s=delay_s, mzxid=mzxid, is_stored=True)
    except NoNodeError:
        pass
    except (CorruptionError, UnauthorizedError) as error:
        refusal = str(error)
        if last_s is None:
            audit = await read_record(store, paths.last_audit, _AuditDelay.parse) or _AuditDelay()
            last_s = max(default_s, audit.recovery_delay_s)
        default_s = last_s
    return Delay(delay_s=default_s, mzxid=mzxid, is_stored=False, refusal=refusal)


def log_refusal(delay: Delay, path: str) -> None:
    """Log an unreadable znode, for services, which go on. A command prints ``refusal`` itself."""
    if delay.refusal:
        log.warning(
            "recovery_delay.unreadable",
            error=delay.refusal,
            used_s=delay.delay_s,
            path=path,
            next_step="write a number of seconds to the znode, or grant access",
        )
