"""A real BookKeeper cluster on this machine, to try things on: ``bookmender local``, demo and
tests.

Real ZooKeeper and real Java bookies on loopback, small enough for a laptop. In reading order:

- ``cluster``: the cluster as one object: started, stopped, and broken on purpose.
- ``spec``: what a cluster is made of, kept in its data ``folder`` so that it comes back the same.
- ``zookeeper``, ``bookie``: the two kinds of server: their settings, folders and readiness.
- ``znodes``: formatting a new cluster, and the few znodes that are read or deleted here.
- ``processes``, ``launcher``: child processes that never outlive us.
- ``servers``: the command line and the folder of each.
- ``java``, ``jars``: the Java to run them with; the jars, from pyspark and fetched once.
- ``ports``: free ports, and whether somebody answers on one.
- ``supervisor``, ``control``: the process behind ``local up``, and how the commands speak to it.
- ``commands``: the command line; ``status`` how the cluster is, ``views`` what is shown of it.
"""
