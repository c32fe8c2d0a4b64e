"""The process: settings, threads, signals, logs, commands, and a local cluster for trials.

The command line starts in ``start`` and ``cli``.

A node: ``daemon_command`` runs a ``node``, which runs two services, ``auditor_half`` (with
``checking``) and ``worker_half``. Each service has one of the ``threads`` and a ``session`` of its
own. Both use ``limits``, ``placing`` with its ``rack_sources``, ``returns`` (bookies that register
again) and ``local_bookie``.

Shared: ``settings``, which ignore the ``service_variables`` of Kubernetes; ``zookeeper`` opens a
store by the settings; ``state`` on the local disk; ``logs`` and ``tracebacks``.

Commands: ``visit`` is the session of a command. ``ledger_command``, ``queue_command``,
``plan_command`` (with ``planning``) and ``restore_command`` are small ones. ``status/``,
``observe/`` and ``fsck/`` are larger. ``operating/`` holds the commands that change a cluster, with
their ``option_types``. ``local/`` runs a real cluster on loopback, and ``demo/`` is ``make demo``.
"""
