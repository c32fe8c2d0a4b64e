"""When a ledger that could not be repaired is tried again, and which ones this node leaves alone
till then.

The first wait and the longest depend on what was in the way: a bookie that does not answer may
answer in a moment, damaged metadata will be so in an hour. Each failure for the same reason doubles
the wait; a success, another reason or a better world begins anew.
"""

import random
from collections.abc import Mapping, Set
from dataclasses import dataclass

from replication.reasons import Reason
from replication.waiting.world import World

LONG, SHORT = (6.0, 12.0), (0.2, 0.2)
PACES: Mapping[Reason, tuple[float, float]] = {
    Reason.NO_COPY: LONG,
    Reason.CORRUPT_METADATA: LONG,
    Reason.SHUT_AWAY: LONG,
    Reason.WRITE_REFUSED: LONG,
    Reason.DIGEST_SUSPECT: LONG,
    Reason.MISPLACED: LONG,
    Reason.NO_ANSWER: SHORT,
    Reason.CONFLICTS: SHORT,
}
"""The first wait and the longest, in terms of the settings'; those as they are for all other
reasons."""
JITTER = 0.2
"""Ledgers that failed together are not all to come back in one moment."""
TRIES_COUNTED_MAX = 30
"""Doubling more often reaches any bound."""
REMEMBERED_S = 3_600.0
"""How long after it was due a deferral still counts as a try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPace:
    """How long to wait between tries, as the settings have it."""

    wait_min_s: float
    wait_max_s: float

    def wait_s(self, reason: Reason | None, *, tries: int, rng: random.Random) -> float:
        """After so many tries that failed for this reason; None: for one that nobody knows."""
        assert tries >= 1, tries
        first, longest = (1.0, 1.0) if reason is None else PACES.get(reason, (1.0, 1.0))
        doubled_s = self.wait_min_s * first * 2.0 ** (min(tries, TRIES_COUNTED_MAX) - 1)
        return min(doubled_s, self.wait_max_s * longest) * rng.uniform(1 - JITTER, 1 + JITTER)


@dataclass(frozen=True, slots=True)
class _Deferral:
    due_s: float
    world: World
    reason: Reason | None
    tries: int
    is_loss: bool


class Deferrals:
    """The ledgers that this worker leaves alone for now, by its own tries or the notes of others.

    Times are monotonic seconds. Ledgers without one are due.
    """

    def __init__(self) -> None:
        self._deferrals: dict[int, _Deferral] = {}

    def defer(
        self,
        ledger_id: int,
        *,
        due_s: float,
        world: World,
        reason: Reason | None,
        tries: int = 1,
        is_loss: bool = True,
    ) -> None:
        """``is_loss``: whether it was known to have lost copies."""
        self._deferrals[ledger_id] = _Deferral(due_s, world, reason, tries, is_loss)

    def is_due(self, ledger_id: int, *, now_s: float, world: World, is_loss: bool = True) -> bool:
        """``is_loss``: as it is now. What was in the way of a move is not waited with when copies
        are lost."""
        deferral = self._deferrals.get(ledger_id)
        return (
            deferral is None
            or deferral.due_s <= now_s
            or (is_loss and not deferral.is_loss)
            or world.has_improved_since(deferral.world, deferral.reason)
        )

    def tries(self, ledger_id: int, reason: Reason | None, *, world: World) -> int:
        """How often it failed in a row for this reason, in a world no worse than this one."""
        deferral = self._deferrals.get(ledger_id)
        if deferral is None or deferral.reason is not reason:
            return 0
        return 0 if world.has_improved_since(deferral.world, reason) else deferral.tries

    def waits_for(self, ledger_id: int, reason: Reason) -> bool:
        """Whether that is why it was left alone at last."""
        deferral = self._deferrals.get(ledger_id)
        return deferral is not None and deferral.reason is reason

    def forget_all(self, reason: Reason) -> None:
        """What they waited for is over: they are due."""
        self._deferrals = {
            ledger_id: deferral
            for ledger_id, deferral in self._deferrals.items()
            if deferral.reason is not reason
        }

    def forget_others(self, ledger_ids: Set[int]) -> None:
        """All but those of these ledgers."""
        for ledger_id in self._deferrals.keys() - ledger_ids:
            del self._deferrals[ledger_id]

    def forget(self, ledger_id: int) -> None:
        self._deferrals.pop(ledger_id, None)

    def prune(self, *, now_s: float) -> None:
        """Forget those that were due long ago: the ledgers are done, by others."""
        self._deferrals = {
            ledger_id: deferral
            for ledger_id, deferral in self._deferrals.items()
            if deferral.due_s + REMEMBERED_S > now_s
        }
