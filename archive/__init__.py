"""The archive of all ledger metadata, outside the cluster, and its restore.

- ``format``: the files of an archive, and the records in them.
- ``places``: where an archive is: a directory, or an object store.
- ``znodes``: what is archived, read from ZooKeeper.
- ``archiver``: writes the archive, as a reader of the change feed.
- ``reading``: the points in time that an archive has, and the state at each.
- ``order``: the znodes of the order to archive, and of how far it is.
- ``keeper``: archives on one node while it is ordered.
- ``restore``: writes a point into a ZooKeeper that has lost its data, and compares two states.
"""
