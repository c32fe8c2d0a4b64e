"""A small asyncio client library for Apache BookKeeper. It knows nothing of queues, leaders or audits.

In reading order: ``model`` has ledgers, segments, fragments and striping as values, ``digest`` the
bytes of an entry, ``errors`` all errors, ``clock`` the time, ``sizes`` byte counts as text,
``mixing`` a hash that all processes share and ``tasks`` helpers for concurrent calls. ``store`` is the interface of the metadata store, and
``bookies`` that of bookies: ``zookeeper``, ``client`` and ``connection`` implement them, ``memory``
does so for tests. ``codec`` converts metadata, ``wire`` the bookies' protocols. ``manager`` reads
and writes ledgers' metadata, ``registration`` lists the bookies, ``placement`` chooses among them,
``health`` spares those that do not answer, and ``host_names`` looks up their addresses. ``bulk``
reads and copies entries by the thousand. ``quorum`` asks the bookies of an ensemble and judges
their answers; with it, ``reading`` opens and reads a ledger, ``writing`` and ``appending`` write
one, and ``fencing`` and ``recovery`` close one whose writer is gone.
"""
