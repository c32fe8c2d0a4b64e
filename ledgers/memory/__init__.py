"""The metadata ``store`` and the ``bookies`` in memory, with faults on request, for tests and
simulation.
"""
