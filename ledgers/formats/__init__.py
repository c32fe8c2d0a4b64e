"""Bytes and names as BookKeeper has them in ZooKeeper: ``metadata_codec`` ledger metadata, ``layout``
paths and the service URI, ``bookie_info`` registrations and cookies, ``named_bookies`` what metadata
that cannot be read still proves, ``protobuf`` what these share. ``pulsar_racks`` is Pulsar's: which rack a
bookie is in.
"""
