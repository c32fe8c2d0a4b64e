"""The change feed: a durable log of all changes of metadata, and clients that recover what they
missed.

- ``model``: checkpoints and spans, and the interface through which a client receives them.
- ``codec``: how checkpoints and bases are stored in entries.
- ``errors``: what a client handles by opening the feed again.
- ``chain``: the znode that lists the ledgers of the feed.
- ``feed_ledgers``: reads these ledgers.
- ``collector``: collects the changes of the ledger map; why no change is missed.
- ``publisher``: writes the feed, as leader.
- ``restores``: notices that ZooKeeper was restored from a backup, as any node.
- ``housekeeping``: writes bases, deletes what is not needed, and notices losses, as leader.
- ``leader_state``: what these two share.
- ``new_ledgers``: creates the ledgers of the feed.
- ``stalls``: whether the feed is stalled, and how far clients are behind, for operators.
- ``log``: the log as a source of checkpoints.
- ``receipts``: ranges of checkpoints that a client has processed, and the interface of their store.
- ``client``: opens everything that a program needs to follow the feed.
- ``recovery``: ``RecoveryService``, through which a client follows the feed.
- ``receipt_book``: what a client was given, and what of it lacks a receipt. No I/O.
- ``batches``: the changes between two ids, for programs that read in batches.
- ``spark``: the feed as a stream of Spark; needs PySpark.
- ``stores``: receipts in SQL databases and in ZooKeeper.
"""
