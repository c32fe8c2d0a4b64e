"""A small asyncio client library for Apache BookKeeper. It knows nothing of queues, leaders or
audits.

Values and decisions: ``metadata``, ``entry``, ``fingerprints``, ``striping``, ``fragments``,
``placement``, ``errors``.

Interfaces between decisions and I/O: ``store``, ``bookies``, ``clock``. On the store: ``manager``
reads and writes ledger metadata, ``registration`` reads the registered bookies, ``instance_id``
identifies the cluster, and ``read_only`` is a store that refuses writes.

Helpers: ``changing`` notifies waiting tasks, ``answers`` retries a call until it succeeds,
``shared_reads`` merges equal reads, ``sizes`` formats byte counts.

``operations`` reads, writes and recovers ledgers. ``bookie``, ``zookeeper`` and ``memory``
implement the interfaces. ``formats`` converts values to bytes and back.
"""
