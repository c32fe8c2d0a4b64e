"""The process: settings, threads, signals, logs, commands, and a local cluster for trials.

``cli`` is the command line, which nothing else imports. A ``node`` runs two services, the two
``roles``: auditor (with ``checking``) and worker. Each has one of the ``threads`` and a ``session``
of its own. Both use ``limits``, ``placement`` and ``local_bookie``. Shared by all: ``settings``,
``settings_source``, ``zookeeper`` (opens sessions), ``state`` on the local disk, the user's
``home``, and ``logs``. The services publish their ``role_state``, which ``http`` serves with
metrics and the state of the cluster. The ``main_loop`` handles signals and reports to the
``service_manager``, systemd; ``live_settings`` reloads settings. ``java_settings`` translates
Java's settings, and ``conflicts`` finds settings that fight each other.

A command opens an ``admin_session`` and calls one of the ``operations``, as the HTTP API does. The
``answers`` are printed as JSON. ``messages`` says in ``words`` why a repair is blocked and what to
do. ``status`` judges the health of the cluster, ``fsck`` checks all copies on Spark, and ``local``
runs a real cluster on loopback. ``notify`` is a server of notifications, a process of its own.
``pages``, ``answers_page`` and ``settings_file`` write pages of the documentation.
"""
