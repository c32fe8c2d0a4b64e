"""Auditors against each other, on a real ZooKeeper where bookies and ledgers are znodes alone.

``field``: those znodes, in growing numbers. ``loss``: a bookie goes, and the clock runs until all
its ledgers are marked. ``weight``: what the ledger map alone weighs. ``turns``: one contender's daemon,
from start to end, and what it costs while nothing happens. ``records``: what was measured.
``report``, ``plot``: the same for people. ``__main__``: the command.
"""
