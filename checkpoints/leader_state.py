"""Settings, state and metrics that the leader's publisher and housekeeper share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from prometheus_client import Counter, Gauge

from checkpoints.chain import NO_FEED, FeedChain
from checkpoints.collector import ChangeCollector
from checkpoints.feed_ledgers import FeedLostError

PENDING = Gauge(
    "bookmender_feed_pending_changes", "Changes that this leader has not published in the feed yet."
)
BYTES = Counter("bookmender_feed_bytes_total", "Bytes that were written to ledgers of the feed.")
FAILURES = Counter(
    "bookmender_feed_failures_total", "Failed attempts to write the feed. Each is tried again."
)
RETRY_MIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSettings:
    """``interval_s``: time between two checkpoints while changes go on. A log ledger is closed
    after ``roll_bytes`` or ``roll_age_s``. A base is written when the log after the last base has
    ``base_bytes_min`` and ``base_factor`` times the size of a base, or after ``base_age_s``.
    ``pending_max``: changes that wait in memory for the next checkpoint. Beyond it they are
    forgotten, and found again by comparison. ``lost_after_s``: how long bookies must say that they
    do not have an entry of the feed before it counts as lost."""

    interval_s: float = 0.05
    roll_bytes: int = 64 << 20
    roll_age_s: float = 6 * 3_600.0
    base_bytes_min: int = 64 << 20
    base_factor: float = 4.0
    base_age_s: float = 86_400.0
    pending_max: int = 500_000
    lost_after_s: float = 60.0


@dataclass(slots=True)
class LeaderState:
    """The feed as the leader knows it. The publisher sets all of it, except ``loss``. The
    housekeeper also sets ``log_bytes`` and ``base_begun_s`` when it writes a base."""

    chain: FeedChain = NO_FEED
    """As the watch reported it last."""
    collector: ChangeCollector | None = None
    """None while the feed is off, and during the comparison with the log."""
    generation: int = 0
    """The generation of the feed that ``collector`` collects for."""
    log_bytes: int = 0
    """Bytes in the log after the last base."""
    base_begun_s: float = 0.0
    """When the last base was begun, or the feed was taken over. Monotonic."""
    loss: FeedLostError | None = None
    """The loss of the log ledger that is being written, found by the housekeeper."""
    leaving: int | None = None
    """A log ledger that is to be closed soon, because a drain waits for it. The housekeeper
    finds it."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Wakes the publisher."""

    @property
    def pending_count(self) -> int:
        return 0 if self.collector is None else len(self.collector)

    def is_wanted(self, generation: int) -> bool:
        """True while this generation is the one to write."""
        return self.chain.is_enabled and self.chain.generation == generation
