"""Bookies that refused copies of a ledger: not asked again for it while they live (rule S11).

A bookie whose garbage collector has deleted a ledger refuses every later add to it, as if it were
fenced, until it restarts. Whoever tries again would copy the ledger's beginning in vain every time.
"""

from collections import OrderedDict

from ledgers.metadata import BookieId
from replication.cluster.cluster_view import ClusterView

LEDGERS_MAX = 10_000
"""Ledgers remembered; the one that was refused longest ago is forgotten first."""


class Refusals:
    """One for a worker. A bookie that registered anew has begun another life: nothing is held
    against it."""

    def __init__(self) -> None:
        self._refusing: OrderedDict[int, dict[BookieId, int]] = OrderedDict()
        """Per ledger the bookies that refused it, with the czxid of their registration."""

    def note(self, ledger_id: int, bookie: BookieId, view: ClusterView) -> None:
        self._refusing.setdefault(ledger_id, {})[bookie] = view.czxid(bookie)
        self._refusing.move_to_end(ledger_id)
        if len(self._refusing) > LEDGERS_MAX:
            self._refusing.popitem(last=False)

    def of(self, ledger_id: int, view: ClusterView) -> set[BookieId]:
        """Those that refused it and are still the same."""
        refusing = self._refusing.get(ledger_id)
        if refusing is None:
            return set()
        return {bookie for bookie, czxid in refusing.items() if view.czxid(bookie) == czxid}
