"""The process: settings, threads, signals, logs, commands, and a local cluster to try things on.

``start`` and ``cli`` are the command. ``daemon_command`` runs a ``node``: its two halves,
``auditor_half`` (with ``checking``) and ``worker_half``, each on one of the ``threads`` with a
``session`` of its own, and around them ``limits``, ``placing`` with its ``rack_sources``, ``returns``
and the ``local_bookie``. ``settings``, without the ``service_variables`` of Kubernetes, the way to ``zookeeper`` that
they say, ``state`` on the local disk, ``logs`` and their ``tracebacks``.

``visit`` is the session of commands that look and go: ``planning``, and the modules called after a command each,
``ledger_command``, ``queue_command``, ``plan_command``, ``restore_command``, and those with more to them, ``status/``,
``observe/``, which only looks on, ``fsck/``. ``operating/``: the commands by which operators change things, by
``option_types`` that they share; ``local/``: a real cluster on loopback; ``demo/``: what ``make demo`` shows.
"""
