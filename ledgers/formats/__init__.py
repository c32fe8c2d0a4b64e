"""Bytes and names as BookKeeper has them in ZooKeeper: ``metadata_codec`` ledger metadata,
``layout`` paths and the service URI, ``bookie_info`` registrations and cookies, ``named_bookies``
what metadata that cannot be read still proves, ``protobuf`` what these share. Pulsar's are
``pulsar_racks``, which rack and which groups a bookie is in, and ``pulsar_isolation``, which groups
a ledger's copies are to stay in.
"""
