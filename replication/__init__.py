"""The under-replication queue, and the worker that takes ledgers from it and repairs them.

The way of a ledger: ``worker`` takes it from the ``queue``, ``repair`` goes round by round: ``check`` what is
missing, ``plan`` what goes where, ``copier`` and ``copying`` do it; ``open_ledger`` when its end is not
known yet; ``outcome`` what became of it, ``deferrals`` and ``waiting`` when that was nothing.
Beneath: ``payloads`` and ``tree`` (Java's znodes), ``own_state`` (ours), ``batching`` (transactions),
``membership`` (our sessions), ``orders`` and ``order_book`` (what operators want), ``cluster_view`` (who
is there, and what is ordered), ``journal``, ``listing``, ``settings``.
"""
