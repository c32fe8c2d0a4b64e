"""``/metrics``: the metrics of this process, for Prometheus.

Each module declares and moves its own metrics. This one adds the state of the services, and the
requests to this server. A scrape reads values that the node has anyway: no ZooKeeper, no bookie,
and no loop over ledgers. The text is kept for a second, so that many scrapers cost as little as
one.
"""

import time
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import REGISTRY, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from daemon.role_state import RoleState

READY = Gauge(
    "bookmender_role_ready",
    "1 if the role has a ZooKeeper session and does its work, by role: worker, auditor or "
    "observer; else 0.",
    ["role"],
)
SILENT_S = Gauge(
    "bookmender_zookeeper_silent_seconds",
    "For how long ZooKeeper does not answer the role, or the role has no session; near 0: it "
    "answers.",
    ["role"],
)
IN_FLIGHT = Gauge(
    "bookmender_zookeeper_requests_in_flight",
    "Requests of the role to ZooKeeper that wait for a reply.",
    ["role"],
)
QUEUED = Gauge(
    "bookmender_zookeeper_requests_waiting",
    "Requests of the role that wait for a limit, or for the connection to ZooKeeper.",
    ["role"],
)
WINDOW = Gauge(
    "bookmender_zookeeper_requests_in_flight_limit",
    "How many requests of the role may be in flight. It shrinks while ZooKeeper replies late.",
    ["role"],
)
RATE_LIMIT = Gauge(
    "bookmender_zookeeper_request_rate_limit",
    "Rate limit of the role's requests to ZooKeeper, per second; 0: none.",
    ["role"],
)
SENT = Gauge(
    "bookmender_zookeeper_session_requests",
    "Requests that the role has sent in its present ZooKeeper session.",
    ["role"],
)
HTTP_S = Histogram(
    "bookmender_http_request_seconds",
    "Duration of requests to this server, by endpoint: metrics, health, api or java.",
    ["endpoint"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 15),
)
INFO = Gauge("bookmender_build_info", "1, with the version of bookmender.", ["version"])

AGE_S = 1.0


@cache
def package_version() -> str:
    """Return the installed version; ``unknown`` if the code runs without an installation."""
    try:
        return version("bookmender")
    except PackageNotFoundError:
        return "unknown"


class MetricsText:
    """Makes the text of ``/metrics``."""

    def __init__(self, roles: Sequence[RoleState]) -> None:
        self._roles = roles
        self._made: dict[str, tuple[float, bytes]] = {}
        """By content type: when the text was made, and the text."""
        # The times of creation are a third more lines, which Prometheus does not use.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no types
        INFO.labels(version=package_version()).set(1)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics and their content type. ``accept``: header of the request, by which
        Prometheus asks for OpenMetrics."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # of the library, for a version that is no number
            encode, content_type = choose_encoder("")
        made_s, text = self._made.get(content_type, (0.0, b""))
        now_s = time.monotonic()
        if not text or now_s - made_s > AGE_S:
            for role in self._roles:
                publish(role)
            text = encode(REGISTRY)
            if len(self._made) > 4:  # the header chooses among few types, but a client writes it
                self._made.clear()
            self._made[content_type] = now_s, text
        return text, content_type


def publish(role: RoleState) -> None:
    """Set the metrics of one service."""
    READY.labels(role=role.name).set(role.is_ready)
    SILENT_S.labels(role=role.name).set(role.silent_s)
    store = role.store
    usage = None if store is None else store.outbox.usage
    IN_FLIGHT.labels(role=role.name).set(usage.in_flight_count if usage else 0)
    QUEUED.labels(role=role.name).set(usage.waiting_count if usage else 0)
    WINDOW.labels(role=role.name).set(usage.in_flight_max if usage else 0)
    RATE_LIMIT.labels(role=role.name).set(usage.per_s_max if usage else 0)
    SENT.labels(role=role.name).set(0 if store is None else store.request_count)
