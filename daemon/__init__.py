"""The process: settings, threads, signals, logs, commands, and a local cluster for trials.

``start`` is the entry point, and ``cli`` the command line. A ``node`` runs two services, the two
``roles``: auditor (with ``checking``) and worker. Each has one of the ``threads`` and a ``session``
of its own. Both use ``limits``, ``placement`` and ``local_bookie``. Shared by all: ``settings``,
``zookeeper`` (opens sessions), ``state`` on the local disk, and ``logs``.

A command opens an ``admin_session``; ``previews`` plans repairs for a command, and
``messages`` says why a repair is blocked and what to do. ``status``,
``observe`` and ``fsck`` are the larger commands. ``local`` runs a real cluster on loopback, and
``demo`` is ``make demo``.
"""
