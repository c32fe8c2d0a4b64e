"""The command line: ``main`` lists the commands, and each file is one command or group.

``daemon`` runs a node. ``bookie`` (``bookies`` gathers its rows), ``drain``, ``maintenance``,
``decommission`` and ``identities`` concern bookies; ``ledger``, ``idle``, ``close_ledger``,
``restore``, ``repair``, ``plan`` and ``queue`` ledgers; ``hold``, ``limits``, ``check`` and
``switch`` the cluster. ``orders``, ``blocked``, ``progress`` and ``option_types`` are shared.
"""
