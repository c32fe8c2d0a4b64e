"""Which bookies are to hold a ledger's entries: pure choices among the writable ones.

``policy`` is the interface: candidates, what a policy is asked, what it may say of an ensemble that
stands. ``plain`` takes any bookie (BookKeeper's DefaultEnsemblePlacementPolicy).
"""

from ledgers.placement.plain import RandomPlacement, choose_ensemble, choose_replacement
from ledgers.placement.policy import DEFAULT_RACK, Adherence, Candidate, PlacementPolicy

__all__ = [
    "DEFAULT_RACK",
    "Adherence",
    "Candidate",
    "PlacementPolicy",
    "RandomPlacement",
    "choose_ensemble",
    "choose_replacement",
]
