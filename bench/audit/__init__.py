"""Compares auditors on a real ZooKeeper, with bookies and ledgers that exist only as znodes.

``field``: the znodes, in growing numbers. ``loss``: deletes a bookie's znode and measures until all
its ledgers are marked. ``weight``: the memory of the ledger map alone. ``turns``: the daemon of one
contender from start to end, and its idle cost. ``records``: the results. ``report``, ``plot``: the
results for people. ``__main__``: the command.
"""
