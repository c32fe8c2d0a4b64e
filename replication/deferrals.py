"""When this node tries a ledger again that it could not repair: a wait that doubles, with jitter."""

import random
from dataclasses import dataclass


@dataclass(slots=True)
class _Deferral:
    next_try_s: float
    wait_s: float


class Deferrals:
    """The ledgers put aside by one worker. Times are monotonic seconds."""

    def __init__(self, *, wait_min_s: float, wait_max_s: float, rng: random.Random) -> None:
        assert 0 < wait_min_s <= wait_max_s, (wait_min_s, wait_max_s)
        self._wait_min_s, self._wait_max_s = wait_min_s, wait_max_s
        self._rng = rng
        self._deferrals: dict[int, _Deferral] = {}

    def defer(self, ledger_id: int, *, now_s: float) -> float:
        """Put the ledger aside, for twice as long as the last time; returns for how many seconds."""
        last = self._deferrals.get(ledger_id)
        wait_s = self._wait_min_s if last is None else min(last.wait_s * 2, self._wait_max_s)
        # Jitter: ledgers that failed together should not all come back in one moment.
        next_try_s = now_s + wait_s * self._rng.uniform(0.8, 1.2)
        self._deferrals[ledger_id] = _Deferral(next_try_s=next_try_s, wait_s=wait_s)
        return next_try_s - now_s

    def forget(self, ledger_id: int) -> None:
        self._deferrals.pop(ledger_id, None)

    def not_due(self, *, now_s: float) -> frozenset[int]:
        """Ledgers that are to be left alone now."""
        return frozenset(i for i, d in self._deferrals.items() if d.next_try_s > now_s)

    def hasten(self) -> None:
        """Circumstances have changed (a bookie came or went): everything is worth a try now.

        And soon again, should that come too early: a bookie is listed before it serves.
        """
        for deferral in self._deferrals.values():
            deferral.next_try_s = 0.0
            deferral.wait_s = self._wait_min_s / 2
