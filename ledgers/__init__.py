"""A small asyncio client library for Apache BookKeeper. It knows nothing of queues, leaders or
audits.

In reading order, which is also the order of the import layers (``pyproject.toml``):

- Values: ``model`` has ledgers, segments, fragments and striping, ``digest`` the bytes of an entry,
  ``errors`` all errors. ``clock`` is the time, ``sizes`` writes byte counts as text, ``mixing`` is
  a hash that all processes share, ``secret`` has values that are never shown, ``tasks`` helps
  with concurrent calls, ``typed`` decodes JSON as objects. ``plain_files`` writes files without
  following links.
- Interfaces: ``store`` is the metadata store, ``bookies`` are the bookies.
- Bytes: ``codec`` converts what BookKeeper stores in ZooKeeper, ``wire`` the bookies' protocols.
- Security: ``security`` has certificates and passwords, from files. ``bookie_auth`` opens
  connections to bookies with TLS and authentication.
- Bookies: ``host_names`` looks up their addresses, ``placement`` chooses among them. ``bulk`` reads
  and copies entries by the thousand. ``connection`` carries single requests, and ``client`` is the
  ``Bookies`` for real bookies. ``health`` spares bookies that do not answer.
- Metadata: ``manager`` reads and writes the metadata of ledgers, ``registration`` lists the
  bookies, ``zookeeper`` is the store on ZooKeeper.
- Ledgers: ``quorum`` asks the bookies of an ensemble and judges their answers. With it, ``reading``
  opens and reads a ledger, ``appending`` and ``writing`` write one, and ``fencing`` and
  ``recovery`` close one whose writer is gone.
"""
