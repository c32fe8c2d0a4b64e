"""The command line: ``main`` lists the commands, and each file is one command or group.

``daemon`` runs a node. ``bookie`` has the commands about bookies; ``ledger``, ``repair``, ``plan``
and ``queue`` those about ledgers; ``orders`` (limits, hold, disable, enable, recovery-delay) and
``check`` those about the cluster; ``feed`` and ``feed_follow`` the feed; ``notify`` notifications;
``archive`` the archive and its restore; and ``history`` shows what happened.
``shell`` has the names and options of ``bookkeeper shell``. ``config`` shows and checks settings,
``doctor`` checks what bookmender needs, and ``completion`` prints a script for a shell. ``names``
lists the names of earlier releases.
``progress``, ``output``, ``paths`` and ``option_types`` are shared.
"""
