"""The under-replication queue, and the worker that takes ledgers from it and repairs them.

The way of a ledger: the ``worker`` takes it from the ``queue``, once its ``lookout`` has found it;
``repair`` goes round by round: ``survey`` looks at the ledger (``check`` what is missing, by ``entry_lists``
where they are wanted), ``plan`` says what goes where, ``copier`` and ``copying`` do it, ``results`` and
``rewrite`` what may be written for it; ``open_ledger`` when its end is not known yet; ``outcome`` what became
of it, for which of the ``reasons``; when that was nothing, the ``waiting_list`` has it. ``slots``: how many
go at once. ``preview``: the same without doing it; ``restoring``: undone from the ``journal``.
How the lookout chooses: ``mark_tree`` (what is listed), ``shares`` (whose it is), ``choice`` (the order),
``urgent`` (the leader's hint); how often: ``idle_waits``. When what waits is tried again: ``waiting`` (notes of all nodes),
``deferrals`` (this one's), ``world`` (what they wait for), ``whereabouts`` (in words).
Who is read from: ``sources``. Who receives: ``targets``, less ``refusals``, from ``room`` (free on the bookies' disks) and ``racks`` (where they are).
Beneath: ``payloads`` and ``tree`` (Java's znodes), ``own_state`` (ours), ``batching`` (transactions),
``disable_switch``,
``membership`` (our sessions), ``orders`` and ``order_book`` (what operators want), ``cluster_view`` (who
is there, and what is ordered), ``entry_runs`` (ids that weigh little), ``listing``, ``summary``,
``settings``.
"""
