"""The metadata store and the bookies in memory, with faults on request, for tests and simulation.

They pass the same contract tests as the real ones. ``store`` is ZooKeeper, of ``nodes``;
``bookies`` what a client sees, each a ``bookie``.
"""
