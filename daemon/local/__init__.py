"""A real BookKeeper cluster on this machine, for trials, demo and tests.

The cluster is a real ZooKeeper and real Java bookies on loopback, small enough for a laptop. In
reading order:

- ``cluster``: the cluster as one object. Starts it, stops it, and breaks it on purpose.
- ``spec``: the description of a cluster, kept in its data ``folder``.
- ``servers``: the settings, the folder and the command line of each server.
- ``security``: TLS, SASL and ACLs of a secured cluster.
- ``znodes``: formats a new cluster, and reads or deletes the few znodes that this package needs.
- ``processes``, ``launcher``: processes that end with this one, or that a later command finds.
- ``java``, ``jars``: finds Java; downloads the jars of BookKeeper once.
- ``ports``: free ports, and whether a server answers on a port.
- ``status``: the state of the cluster; ``writing``: the ledgers of ``local write`` and of the demo.
"""
