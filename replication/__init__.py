"""The queue of under-replicated ledgers, and the worker that repairs them.

The way of a ledger: the ``worker`` locks it in the ``queue``. ``repair`` runs in rounds:
``planning`` finds missing copies and chooses targets, ``copying`` copies, and one transaction
writes the metadata. The ``outcome`` has one of the ``reasons`` if the ledger is blocked; then
``waiting`` defers it.

Around it: ``recent_copies`` records new copies, which are read again later. ``slots`` limits
concurrent repairs. ``summary`` logs progress. ``cluster`` knows the nodes, the bookies and the
operators' orders. ``given_up`` records entries that an operator gave up. ``restoring`` undoes a
metadata write from the ``journal``. ``settings`` are the settings.
"""
