"""Formats a new cluster, and reads or deletes the few znodes that this package needs.

Formatting by hand takes milliseconds, while ``bookkeeper shell initnewcluster`` starts a JVM. The
znodes are those of BookKeeper's ZKRegistrationManager.initNewCluster and LayoutManager.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError

from daemon.local.ports import LOOPBACK
from daemon.local.spec import LEDGERS_ROOT
from ledgers.codec.layout import Layout, serialize_layout
from ledgers.errors import UnavailableError
from ledgers.model import BookieId

CONNECT_TIMEOUT_S = 10.0
AVAILABLE = f"{LEDGERS_ROOT}/available"
READ_ONLY = f"{AVAILABLE}/readonly"
COOKIES = f"{LEDGERS_ROOT}/cookies"


@contextmanager
def session(zookeeper_port: int, *, superuser: str | None = None) -> Iterator["Znodes"]:
    """Open a short session. ``superuser``: name and password, if znodes have ACLs. Raises
    UnavailableError if ZooKeeper does not answer."""
    auth = [] if superuser is None else [("digest", superuser)]
    client = KazooClient(f"{LOOPBACK}:{zookeeper_port}", timeout=CONNECT_TIMEOUT_S, auth_data=auth)
    try:
        client.start(CONNECT_TIMEOUT_S)
        yield Znodes(client)
    except (KazooException, KazooTimeoutError) as error:
        raise UnavailableError("ZooKeeper does not answer", port=zookeeper_port) from error
    finally:
        client.stop()
        client.close()


class Znodes:
    """The znodes that this package reads and writes."""

    def __init__(self, client: KazooClient) -> None:
        self._client = client

    def format(self, layout: Layout) -> None:
        """Create an empty cluster if there is none. INSTANCEID is created last: it means that
        formatting is complete."""
        if self._client.exists(f"{LEDGERS_ROOT}/INSTANCEID"):
            return
        for path, data in (
            (LEDGERS_ROOT, b""),
            (AVAILABLE, b""),
            (READ_ONLY, b""),
            (f"{LEDGERS_ROOT}/LAYOUT", serialize_layout(layout)),
            (f"{LEDGERS_ROOT}/INSTANCEID", str(uuid.uuid4()).encode()),
        ):
            with suppress(NodeExistsError):
                self._client.create(path, data)

    def writable(self) -> frozenset[BookieId]:
        return self._children(AVAILABLE) - {BookieId("readonly")}

    def read_only(self) -> frozenset[BookieId]:
        return self._children(READ_ONLY)

    def registration(self, bookie: BookieId) -> int | None:
        """Return a number that differs for every registration of the bookie; None if it is not
        registered."""
        for parent in (AVAILABLE, READ_ONLY):
            if found := self._client.exists(f"{parent}/{bookie}"):
                return int(found.czxid)
        return None

    def delete_registration(self, bookie: BookieId) -> None:
        """Delete the registration of a bookie that does not run, as the expiry of its session
        would."""
        for parent in (AVAILABLE, READ_ONLY):
            with suppress(NoNodeError):
                self._client.delete(f"{parent}/{bookie}")

    def has_cookie(self, bookie: BookieId) -> bool:
        return self._client.exists(f"{COOKIES}/{bookie}") is not None

    def delete_cookie(self, bookie: BookieId) -> None:
        with suppress(NoNodeError):
            self._client.delete(f"{COOKIES}/{bookie}")

    def _children(self, path: str) -> frozenset[BookieId]:
        try:
            return frozenset(map(BookieId, self._client.get_children(path)))
        except NoNodeError:
            return frozenset()
