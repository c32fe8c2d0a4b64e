"""Metrics of a server of notifications."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

CLIENTS = Gauge("bookmender_notify_clients", "Connected clients.")
REGISTRATIONS = Gauge(
    "bookmender_notify_registered_objects", "Objects for which at least one client registered."
)
KNOWN = Gauge("bookmender_notify_known_objects", "Objects whose version is known.", ["kind"])
AGE_S = Gauge(
    "bookmender_notify_age_seconds",
    "How long the server has heard nothing new from ZooKeeper or the change feed.",
)
CONGESTED = Gauge(
    "bookmender_notify_congested_clients", "Clients that read more slowly than they are told."
)
CHANGES = Counter(
    "bookmender_notify_changes", "Changes of objects that the server learned.", ["kind"]
)
TOLD = Counter("bookmender_notify_notifications", "Changes that clients were told.")
FRAMES = Counter("bookmender_notify_frames", "Frames that were sent to clients.")
UNKNOWN = Counter(
    "bookmender_notify_unknown", "Objects of which a client was told that the version is unknown."
)
RESYNCS = Counter(
    "bookmender_notify_resyncs", "Clients whose position was of no use, and who were told all."
)
REFUSED = Counter(
    "bookmender_notify_refused", "Registrations and connections that were refused.", ["code"]
)
GOODBYES = Counter("bookmender_notify_goodbyes", "Clients that were sent away.", ["code"])
PUBLISHED = Counter("bookmender_notify_published", "Publications through this server.")
