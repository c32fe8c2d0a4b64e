"""Bytes and names as BookKeeper has them in ZooKeeper: ``metadata_codec`` ledger metadata, ``layout``
paths and the service URI, ``bookie_info`` registrations and cookies, ``protobuf`` what these share.
"""
