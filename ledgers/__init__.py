"""What a ledger is, and how to speak to bookies and to the metadata store about it.

A small asyncio client library for Apache BookKeeper that knows nothing of queues, leaders or audits.
Values and decisions first: ``metadata``, ``entry``, ``fingerprints``, ``striping``, ``fragments``,
``placement``, ``errors``. Then the three interfaces that part what decides from what talks: ``store``,
``bookies``, ``clock``; and on the first of them ``manager`` (ledgers' metadata), ``registration`` (who
is there) and ``instance_id`` (which cluster this is). ``read_only`` keeps whoever looks on from writing;
``changing`` is what others wait for, ``answers`` how a loop waits for an answer, ``shared_reads`` joins reads of many callers, and ``sizes`` tells people of bytes.
``operations`` reads, writes and recovers ledgers; ``bookie``, ``zookeeper`` and ``memory`` implement the
interfaces; ``formats`` knows the bytes.
"""
