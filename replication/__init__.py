"""The under-replication queue, and the worker that takes ledgers from it and repairs them.

The way of a ledger: the ``worker`` takes it from the ``queue``, once its ``lookout`` has found it;
``repair`` goes round by round: ``check`` what is missing, ``plan`` what goes where, ``copier`` and
``copying`` do it; ``open_ledger`` when its end is not known yet; ``outcome`` what became of it; when that
was nothing, the ``waiting_list`` has it. ``slots``: how many go at once.
How the lookout chooses: ``mark_tree`` (what is listed), ``shares`` (whose it is), ``choice`` (the order),
``urgent`` (the leader's hint). When what waits is tried again: ``waiting`` (notes of all nodes),
``deferrals`` (this one's), ``world`` (what they wait for), ``whereabouts`` (in words).
Who receives: ``targets``, from ``room`` (free on the bookies' disks) and ``racks`` (where they are).
Beneath: ``payloads`` and ``tree`` (Java's znodes), ``own_state`` (ours), ``batching`` (transactions),
``membership`` (our sessions), ``orders`` and ``order_book`` (what operators want), ``cluster_view`` (who
is there, and what is ordered), ``journal``, ``listing``, ``summary``, ``settings``.
"""
