"""The command line: ``start`` is the entry point, ``main`` lists the commands, and each other file
is one command or group.

``daemon`` runs a node. ``status`` (with ``status_watch``) shows the health, ``history`` what
happened. ``bookie`` has the commands about bookies; ``ledger``, ``repair``, ``plan`` and ``queue``
those about ledgers; ``orders`` (limits, hold, disable, enable, recovery-delay) and ``check`` those
about the cluster. ``fsck`` checks all copies on Spark. ``feed`` and ``feed_follow`` have the feed,
``notify`` notifications, ``archive`` the archive and its restore. ``shell`` has the names and
options of ``bookkeeper shell``. ``config`` shows and checks settings, ``doctor`` checks what
bookmender needs, and ``completion`` prints a script for a shell. ``local`` runs a cluster on this
machine, and ``demo`` is ``make demo``. ``names`` lists the names of earlier releases.

``session`` (the settings and the session of a command), ``progress``, ``output``, ``paths`` and
``option_types`` are shared.
"""
