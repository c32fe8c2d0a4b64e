"""How much to ask of a bookie at a time so that its other clients hardly notice. A pure decision.

A bookie works off its requests in turn, so what we have in flight there is what another client's
request waits behind. Nobody tells us of that client; but our own requests wait in the same queues.
So each bookie's reply time is compared to what it is when we ask little, which is tried out every
few seconds: while it is about the same a little more is asked; when it is longer, or the bookie says
that it is too busy, much less (additive increase, multiplicative decrease; compare LEDBAT, RFC 6817,
which does it for downloads). Reads and adds wait in different queues and are judged apart.
"""

import statistics

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


class Yielding:
    """The limit for one kind of request at one bookie. At least 1, at most the cap given."""

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
