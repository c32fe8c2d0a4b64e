"""The HTTP server of a node: metrics, health, and the API below ``/api/v1``.

``server`` owns the thread and the port, ``connections`` bounds the connections from accept on, and
``app`` handles requests: who may ask what, and within which limits. ``endpoints`` lists the paths
of ``health`` (``/healthz``, ``/readyz``), ``metrics`` (``/metrics``), ``api`` (reading), ``changes`` (changing) and ``java`` (BookKeeper's own
paths). ``records`` has the types of the answers, from which ``openapi`` makes the description of
the API. ``cluster_reader`` reads ZooKeeper for all of them, in a session of its own, on the thread
of ``loop_thread``. ``access`` checks tokens and addresses, and ``tls`` has the certificates.
``live`` serves the page for people at ``/``, and ``page`` writes its HTML; ``page.css`` and
``page.js`` are package data. ``metrics_page`` writes docs/metrics.md.

Nothing here touches the roles of the node: their threads publish ``daemon.role_state``, and a
failure of this package stops no repair.
"""
