"""The HTTP server of a node: metrics, health, and the API below ``/api/v1``.

``server`` owns the thread and the port, ``connections`` bounds the connections from accept on, and
``app`` routes requests within limits. ``endpoints`` says what an endpoint is. ``api`` has
bookmender's own paths (``health``, ``metrics`` and ``changes`` make their answers), ``java_paths``
those of BookKeeper (``java`` makes the answers). ``records`` has the types of the answers, from
which ``openapi`` makes the description of the API. ``cluster_reader`` reads ZooKeeper for all of
them, in a session and a thread of its own, and ``condition_metrics`` publishes the conditions as a
metric. ``access`` checks tokens and addresses, and ``tls`` has the certificates. ``page`` serves
the page for people at ``/``: the files ``page.html``, ``page.css`` and ``page.js``.
``metrics_page`` writes docs/metrics.md, and ``paths_page`` the tables of docs/http.md.

Nothing here touches the roles of the node: their threads publish ``daemon.role_state``, and a
failure of this package stops no repair.
"""
