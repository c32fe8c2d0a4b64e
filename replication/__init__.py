"""The queue of under-replicated ledgers, and the worker that repairs them.

A repair, in reading order: ``worker`` leases ledgers and runs their ``repair``s, at most as many as
``slots`` allow. ``inspection`` finds what a ledger lacks, with ``copy_checks`` and ``entry_runs``;
``open_ledgers`` decides about ledgers that are not closed; ``plan`` decides what is copied where,
among the ``targets``; ``copier`` and ``copying`` copy; ``commit`` decides which metadata may be
written. ``outcome`` and ``reasons`` say how it ended, and ``preview`` shows all that in advance.

The queue: ``work_queue`` on the tree of ``marks``, ``locks`` and ``lock_by_hand``,
``ledger_picker`` for what comes next, ``backoff`` and ``ledger_record`` for ledgers that cannot be
repaired now, ``recent_copies`` for copies to be read again. ``transactions`` batches writes;
``znodes`` has the paths and contents of znodes.

The cluster: its bookies (``cluster``, ``racks``, ``disk_space``), our ``nodes``, the ``orders`` of
operators and ``client_activity``. ``journal`` records every write of metadata, and ``restore``
takes one back. ``settings`` is what an operator may set.
"""
