"""How much this process asks of each bookie: the one place that decides it.

The strictest of these bounds counts:

1. Hard caps, which always hold: reads in flight of all our processes together (rule S10), entries and bytes on
   their way to one target, the limits that an operator sets.
2. Clients of the bookie. While some are active there, or nobody knows, copies keep to a rate that its clients
   hardly notice. All nodes at work share that rate. While none is active there is no rate.
3. Reply times, unless no client is active. Our requests wait in the same queues as those of clients, so what is in flight
   shrinks while a bookie replies later than it does when little is asked (``ReplyTimes``).

``flow_limits`` decides 1 and 2, ``ReplyTimes`` decides 3. ``FlowControl`` carries them out: it sets the paces that copies
pass (``gates``) and the limits that the connections keep to (``source``, ``target``).
"""

import enum
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from ledgers.bookie.bulk.gates import Pace
from ledgers.metadata import BookieId

SHARED_ADDS_PER_S = 5_000
"""Entries that all nodes together add in a second to a bookie whose clients are active. Each transfer counts as
``STARTING_ENTRIES`` more: most of what a small ledger costs is its check and its metadata."""
SHARED_READS_PER_S = 5_000
"""Likewise entries read from it, many in a request."""
SHARED_SINGLE_READS_PER_S = 1_500
"""Likewise entries read one by one, as those of striped ledgers are. Each is a request, which costs its bookie about what
two entries of a batch do."""
SHARED_BYTES_PER_S = 65_000_000
"""Likewise bytes, read and added: where entries are large."""
STARTING_ENTRIES = 30
BURST_S = 0.05
"""Clients wait behind a whole burst of ours."""

ROUND_SAMPLES = 5
"""Reply times to a decision: their median is not moved by one that was held up on its own."""
GROWTH_TOLERATED = 1.25
DELAY_TOLERATED_S = 0.001
"""What we may add to a bookie's reply times: a quarter, or this where they are short."""
TRIAL_INTERVAL_S = 10.0
TRIAL_SHARE = 4
TRIAL_ROUNDS = 2
"""So often, for so many rounds, only this part of the limit is asked. The first of them still waits
behind what was asked before."""
DECREASE = 0.7
DECREASE_IF_BUSY = 0.5
STEPS = 32
"""From nothing to the cap, in decisions."""
START_SHARE = 4
"""The first guess is this part of the cap."""


class Activity(enum.Enum):
    """Whether clients read or write at a bookie now."""

    QUIET = "quiet"
    ACTIVE = "active"
    UNKNOWN = "unknown"
    """Nobody has looked lately. Treated as active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowLimits:
    """What one process may ask of one bookie. Rates are per second; 0: no limit."""

    reads_per_s: int = 0
    single_reads_per_s: int = 0
    adds_per_s: int = 0
    bytes_per_s: int = 0
    is_by_reply_times: bool = True
    """Whether what is in flight shrinks further while the bookie replies late."""

    @property
    def is_full_speed(self) -> bool:
        return not self.adds_per_s


def flow_limits(activity: Activity, *, yields: bool, sharer_count: int) -> FlowLimits:
    """Return what a process may ask of a bookie.

    ``yields``: whether clients go first at all. ``sharer_count``: processes that copy now, this one included.
    """
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
    """How much one kind of request may be in flight at one bookie, by its reply times. At least 1, at most the cap.

    A reply time is compared to what it is when we ask little, which is tried out every few seconds. While it is
    about the same the limit grows a little; when it is longer, or the bookie says that it is busy, the limit shrinks
    much (additive increase, multiplicative decrease; LEDBAT, RFC 6817, does so for downloads). Reads and adds
    wait in different queues and are judged apart.
    """

    def __init__(self, *, cap: int) -> None:
        assert cap >= 1, cap
        self.cap = cap
        """Above which it never goes, whatever the reply times. May be changed at any time."""
        self._limit = max(1.0, cap / START_SHARE)
        self._base_s = 0.0
        """The reply time when little is asked."""
        self._reply_s = 0.0
        self._trial_rounds = TRIAL_ROUNDS
        """Rounds of the trial that are still to come. It begins with one."""
        self._tried_s = 0.0
        self._samples: list[float] = []

    @property
    def limit(self) -> int:
        limit = self._limit / TRIAL_SHARE if self._trial_rounds else self._limit
        return max(1, min(self.cap, int(limit)))

    @property
    def reply_s(self) -> float:
        """The last median of the reply times."""
        return self._reply_s

    def note_reply(self, latency_s: float, *, is_limiting: bool, now_s: float) -> None:
        """One request was answered after so long. ``is_limiting``: whether more was to be asked.

        Without that a good reply time says nothing of what a higher limit would do.
        """
        self._samples.append(latency_s)
        if len(self._samples) >= ROUND_SAMPLES:
            median_s = statistics.median(self._samples)
            self._samples.clear()
            self._reply_s = median_s
            self._judge(median_s, is_limiting=is_limiting, now_s=now_s)

    def note_busy(self) -> None:
        """The bookie asked us to slow down."""
        self._samples.clear()
        self._limit = max(1.0, self._limit * DECREASE_IF_BUSY)

    def _judge(self, median_s: float, *, is_limiting: bool, now_s: float) -> None:
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


class BookieFlow:
    """The paces of one bookie, which copies pass before they ask it for anything. Shared by all connections to it."""

    def __init__(self, limits: FlowLimits) -> None:
        self.reads, self.single_reads = Pace(burst_s=BURST_S), Pace(burst_s=BURST_S)
        self.adds = Pace(burst_s=BURST_S, starting_entries=STARTING_ENTRIES)
        self._listeners: list[Callable[[], None]] = []
        self.allow(limits)

    def allow(self, limits: FlowLimits) -> None:
        self.limits = limits
        for pace, per_s in (
            (self.reads, limits.reads_per_s),
            (self.single_reads, limits.single_reads_per_s),
            (self.adds, limits.adds_per_s),
        ):
            pace.set(entries_per_s=per_s, bytes_per_s=limits.bytes_per_s)
        for tell in self._listeners:
            tell()

    def on_change(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` whenever more or less may be asked."""
        self._listeners.append(tell)

    def close(self) -> None:
        for pace in (self.reads, self.single_reads, self.adds):
            pace.close()


ActivityOf = Callable[[BookieId], Activity]


def _unknown(bookie: BookieId) -> Activity:
    return Activity.UNKNOWN


class FlowControl:
    """The flows of one process, by bookie. Belongs to one loop."""

    def __init__(self, *, yields: bool = True) -> None:
        self._yields = yields
        self._activity_of: ActivityOf = _unknown
        self._sharer_count = 1
        self._flows: dict[BookieId, BookieFlow] = {}

    def of(self, bookie: BookieId) -> BookieFlow:
        flow = self._flows.get(bookie)
        if flow is None:
            flow = self._flows[bookie] = BookieFlow(self._limits(bookie))
        return flow

    @property
    def yields(self) -> bool:
        """Whether clients go first. May be set at any time."""
        return self._yields

    @yields.setter
    def yields(self, yields: bool) -> None:
        self._yields = yields
        self._allow()

    def tell(self, activity_of: ActivityOf | None, *, sharer_count: int) -> None:
        """Keep to this from now on. None: nobody knows anything."""
        self._activity_of, self._sharer_count = activity_of or _unknown, sharer_count
        self._allow()

    @property
    def is_yielding(self) -> bool:
        """Whether copies are held back at any of the bookies in use."""
        return any(not flow.limits.is_full_speed for flow in self._flows.values())

    def close(self) -> None:
        for flow in self._flows.values():
            flow.close()

    def _limits(self, bookie: BookieId) -> FlowLimits:
        return flow_limits(
            self._activity_of(bookie),
            yields=self._yields,
            sharer_count=self._sharer_count,
        )

    def _allow(self) -> None:
        for bookie, flow in self._flows.items():
            limits = self._limits(bookie)
            if limits != flow.limits:
                flow.allow(limits)
