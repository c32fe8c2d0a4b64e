"""The command line: ``main`` lists the commands, and each file is one command or group.

``daemon`` runs a node. ``bookie`` (``bookies`` gathers its rows), ``drain``, ``maintenance``,
``decommission`` and ``identities`` concern bookies; ``ledger``, ``idle``, ``close_ledger``,
``restore``, ``repair``, ``plan`` and ``queue`` ledgers; ``hold``, ``limits``, ``check`` and
``switch`` the cluster; ``feed`` and ``feed_follow`` the feed; and
``history`` shows what happened in the cluster.
``shell`` has the names and options of ``bookkeeper shell``. ``config`` shows and checks settings,
``doctor`` checks what bookmender needs, and ``completion`` prints a script for a shell.
``orders``, ``blocked``, ``progress``, ``output``, ``paths`` and ``option_types`` are
shared.
"""
