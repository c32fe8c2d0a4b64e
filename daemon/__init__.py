"""The process: settings, threads, signals, logs, commands, and a local cluster to try things on.

``start`` and ``cli`` the command; ``node`` one daemon, its two halves (``auditor_half``, ``worker_half``) on
``threads``, each with a ``session``;
``observing`` what only looks on, ``observe_node`` and ``observe_report`` what it says; ``state`` on the local disk;
``settings``, the way to ``zookeeper`` that they say, ``logs`` and their ``tracebacks``, ``limits``,
``local_bookie``, ``placing`` with its ``rack_sources``; ``visit`` and ``status`` for the commands that look;
``fsck_command`` with its ``fsck_options`` and ``fsck_texts``, ``fsck_running`` what a run has around it;
``operating/`` those by which operators change things, ``local/`` a real cluster on loopback, ``demo/``
what `make demo` shows.
"""
