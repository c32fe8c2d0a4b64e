"""Flow control: how much this process may request of each bookie.

An entry to be copied passes these limits, in this order. "Active" limits apply only to bookies
whose clients are active, or whose activity is unknown.

    limit                          applies to         set by                waits here
    -----------------------------  -----------------  --------------------  --------------------
    1 rate of reads                source, if active  ``flow_limits``       the read part
    2 rate of adds                 target, if active  ``flow_limits``       the read part
    3 rate limit                   this process       the operator          the read part
    4 window of adds in flight     target             rate of replies; if   the read part
                                                      active, reply times
    5 memory: entries in flight    this process       hard cap              the read part
    6 reads in flight              source             if active, reply      the connection, for
                                                      times                 the next reply
    7 window of reads in flight    source             rate of replies       the connection, for
                                                                            the next reply
    8 read budget (rule S10)       source, shared     hard cap              the connection, in
                                   with control path                        the budget's line

An entry that is only verified passes limits 5 to 8. For ``fsck`` and commands it also passes limit
3.

Limits 1 to 5 form the ``LimiterChain`` of a transfer. A limiter without credit takes the read part
out of its source's turns, and other transfers go on; the limiters before it get their credit back.
So the scarcest credit comes first: then a part seldom takes credit only to return it. Limits 6 to
8 come last because they concern the whole connection. What they do not grant is also returned to
the chain.

All bookies share the memory (5). So the windows of a bookie (4 and 7) follow the rate at which it
replies (``limiters.BookieWindow``): a bookie that is slow, but not silent, occupies little of it. A
bookie that answers less than the smallest window within the timeout counts as unresponsive
(``TransferPart.is_slow``).

Three kinds of limits cannot be merged into one, because they measure different things. They limit
entries per second, entries in flight from request to acknowledgement, and reads in flight from
request to reply.

Reply times (``ReplyTimes``): at a bookie with active clients, the requests in flight shrink while
the bookie replies later than it does under little load. All nodes share the rates 1 and 2. Without
active clients only hard caps and the operator's limit apply.

``flow_limits`` decides; ``FlowControl`` applies the decision to rate limiters and connections.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from ledgers.bulk.limiters import RateLimiter
from ledgers.model import BookieId

SHARED_ADDS_PER_S = 5_000
"""Entries that all nodes together add per second to one bookie with active clients. Each transfer
counts as ``STARTING_ENTRIES`` additional entries, because checks and metadata make up most of the
cost of a small ledger."""
SHARED_READS_PER_S = 5_000
"""Entries read per second from one bookie with active clients, by batch reads."""
SHARED_SINGLE_READS_PER_S = 2_500
"""Entries read per second by single-entry reads, which striped ledgers need. A single read costs
the bookie about as much as two entries of a batch."""
SHARED_BYTES_PER_S = 65_000_000
"""Bytes per second, which limit reads and adds of large entries."""
STARTING_ENTRIES = 30
BURST_S = 0.02
"""Unused credit is kept for this long. A client's request may wait behind a whole burst."""

ROUND_SAMPLES = 5
"""Reply times per decision. Their median ignores a single slow reply."""
GROWTH_TOLERATED = 1.25
DELAY_TOLERATED_S = 0.001
"""Our requests may delay the replies of a bookie by a quarter, plus this time."""
TRIAL_INTERVAL_S = 10.0
TRIAL_SHARE = 4
TRIAL_ROUNDS = 2
"""At this interval, ``TRIAL_ROUNDS`` rounds run at a fraction of the limit, to measure the reply
time under little load. The first of these rounds still queues behind earlier requests."""
DECREASE = 0.7
DECREASE_IF_BUSY = 0.5
STEPS = 32
"""Decisions that it takes to grow from 0 to the cap."""
START_SHARE = 4
"""The first limit is this fraction of the cap."""


class Activity(enum.Enum):
    """The activity of a bookie's clients."""

    QUIET = "quiet"
    ACTIVE = "active"
    UNKNOWN = "unknown"
    """Treated as active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowLimits:
    """The limits of one process at one bookie. Rates are per second; 0 means no limit."""

    reads_per_s: int = 0
    single_reads_per_s: int = 0
    adds_per_s: int = 0
    bytes_per_s: int = 0
    is_by_reply_times: bool = True
    """True if the number of requests in flight shrinks while the bookie replies late."""

    @property
    def is_full_speed(self) -> bool:
        return not self.adds_per_s


def flow_limits(activity: Activity, *, yields: bool, sharer_count: int) -> FlowLimits:
    """Return what one process may ask of a bookie. ``yields``: False if copies never wait for
    clients. ``sharer_count``: processes that copy now and share the rates, at least 1."""
    assert sharer_count >= 1, sharer_count
    if activity is Activity.QUIET or not yields:
        return FlowLimits(is_by_reply_times=False)

    def share(per_s: int) -> int:
        return max(1, per_s // sharer_count)

    return FlowLimits(
        reads_per_s=share(SHARED_READS_PER_S),
        single_reads_per_s=share(SHARED_SINGLE_READS_PER_S),
        adds_per_s=share(SHARED_ADDS_PER_S),
        bytes_per_s=share(SHARED_BYTES_PER_S),
    )


class ReplyTimes:
    """A limit on the requests of one kind in flight at one bookie, derived from its reply times.

    The limit is between 1 and the cap. Every few seconds a trial with few requests measures the
    base reply time. While replies take about that long, the limit grows by a small step. When they
    take longer, or when the bookie reports that it is busy, the limit shrinks by a factor (additive
    increase, multiplicative decrease; LEDBAT, RFC 6817, does this for downloads). Reads and adds
    wait in different queues, so each has a limit of its own.
    """

    def __init__(self, *, cap: int) -> None:
        assert cap >= 1, cap
        self.cap = cap
        """The upper bound of the limit. May be changed at any time."""
        self._limit = max(1.0, cap / START_SHARE)
        self._base_s = 0.0
        """The reply time under little load."""
        self.reply_s = 0.0
        """The median reply time of the last round."""
        self._trial_rounds = TRIAL_ROUNDS
        """Rounds left of the current trial. The first trial starts at once."""
        self._tried_s = 0.0
        self._samples: list[float] = []

    @property
    def limit(self) -> int:
        limit = self._limit / TRIAL_SHARE if self._trial_rounds else self._limit
        return max(1, min(self.cap, int(limit)))

    def note_reply(self, latency_s: float, *, is_limiting: bool, now_s: float) -> None:
        """Record one reply time. ``is_limiting``: whether the limit delayed requests; else a short
        time does not show that a higher limit would be harmless."""
        self._samples.append(latency_s)
        if len(self._samples) < ROUND_SAMPLES:
            return
        median_s = self.reply_s = statistics.median(self._samples)
        self._samples.clear()
        if self._trial_rounds:
            self._trial_rounds -= 1
            if self._trial_rounds == 0:
                self._base_s, self._tried_s = median_s, now_s
            return
        if median_s > self._base_s * GROWTH_TOLERATED + DELAY_TOLERATED_S:
            self._limit = max(1.0, self._limit * DECREASE)
        elif is_limiting:
            self._limit = min(self.cap, self._limit + max(1.0, self.cap / STEPS))
        if now_s - self._tried_s > TRIAL_INTERVAL_S:
            self._trial_rounds = TRIAL_ROUNDS

    def note_busy(self) -> None:
        """Record that the bookie replied "too many requests"."""
        self._samples.clear()
        self._limit = max(1.0, self._limit * DECREASE_IF_BUSY)


class BookieFlow:
    """The limits and rate limiters of one bookie, shared by all connections to it."""

    def __init__(self, limits: FlowLimits) -> None:
        self.reads, self.single_reads = RateLimiter(burst_s=BURST_S), RateLimiter(burst_s=BURST_S)
        self.adds = RateLimiter(burst_s=BURST_S, starting_entries=STARTING_ENTRIES)
        self.listeners: list[Callable[[], None]] = []
        """Called after each change of the limits."""
        self.allow(limits)

    def allow(self, limits: FlowLimits) -> None:
        self.limits = limits
        for limiter, per_s in (
            (self.reads, limits.reads_per_s),
            (self.single_reads, limits.single_reads_per_s),
            (self.adds, limits.adds_per_s),
        ):
            limiter.set(entries_per_s=per_s, bytes_per_s=limits.bytes_per_s)
        for notify in self.listeners:
            notify()

    def close(self) -> None:
        for limiter in (self.reads, self.single_reads, self.adds):
            limiter.close()


ActivityOf = Callable[[BookieId], Activity]


class FlowControl:
    """The flows of one process, by bookie. Used by one event loop only."""

    def __init__(self, *, yields: bool = True) -> None:
        self._yields = yields
        self._activity_of: ActivityOf | None = None
        self._sharer_count = 1
        self._flows: dict[BookieId, BookieFlow] = {}

    def of(self, bookie: BookieId) -> BookieFlow:
        flow = self._flows.get(bookie)
        if flow is None:
            flow = self._flows[bookie] = BookieFlow(self._limits(bookie))
        return flow

    @property
    def yields(self) -> bool:
        """True if copies yield to active clients. May be set at any time."""
        return self._yields

    @yields.setter
    def yields(self, yields: bool) -> None:
        self._yields = yields
        self._allow()

    def set_activity(self, activity_of: ActivityOf | None, *, sharer_count: int) -> None:
        """Apply this client activity from now on. None: the activity of all bookies is unknown."""
        self._activity_of, self._sharer_count = activity_of, sharer_count
        self._allow()

    @property
    def is_yielding(self) -> bool:
        """True if a rate limits the copies at any bookie in use."""
        return any(not flow.limits.is_full_speed for flow in self._flows.values())

    def close(self) -> None:
        for flow in self._flows.values():
            flow.close()

    def _limits(self, bookie: BookieId) -> FlowLimits:
        activity = self._activity_of(bookie) if self._activity_of else Activity.UNKNOWN
        return flow_limits(activity, yields=self._yields, sharer_count=self._sharer_count)

    def _allow(self) -> None:
        for bookie, flow in self._flows.items():
            limits = self._limits(bookie)
            if limits != flow.limits:
                flow.allow(limits)
