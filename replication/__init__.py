"""The queue of under-replicated ledgers, and the worker that repairs them.

A repair, in reading order: ``worker`` leases ledgers and runs their ``repair``s, at most as many as
``slots`` allow. ``inspection`` finds what a ledger lacks, with ``copy_reader`` and ``entry_runs``.
``open_ledgers`` decides about ledgers that are not closed. ``plan`` decides what is copied where,
among the ``targets``. ``copying`` copies. ``commit`` decides which metadata may be written.
``reasons`` says what blocks it.

The queue: ``work_queue`` locks ledgers of the tree of ``marks``. ``backoff`` and ``ledger_record``
are for ledgers that cannot be repaired now, and ``recent_copies`` for copies that must be read
again. ``transactions`` batches writes; ``records`` reads and writes bookmender's own znodes;
``znodes`` has all paths, and the contents of the znodes shared with Java.

The cluster: its bookies (``cluster``, ``racks``), our ``nodes``, the ``orders`` of
operators and ``client_activity``. ``history`` records what happened. ``journal`` records every
write of metadata. Commands use ``by_hand``: it plans a repair without doing it, holds a ledger's
lock, and undoes a write. ``settings`` is what an operator may set.
"""
