"""Formatting a new cluster, and the few znodes that are read or deleted here.

Formatting by hand takes milliseconds where ``bookkeeper shell initnewcluster`` starts a JVM. The
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
def session(zookeeper_port: int) -> Iterator["Znodes"]:
    """A short session. Raises UnavailableError when ZooKeeper does not answer."""
    client = KazooClient(f"{LOOPBACK}:{zookeeper_port}", timeout=CONNECT_TIMEOUT_S)
    try:
        client.start(CONNECT_TIMEOUT_S)
        yield Znodes(client)
    except (KazooException, KazooTimeoutError) as error:
        raise UnavailableError("ZooKeeper does not answer", port=zookeeper_port) from error
    finally:
        client.stop()
        client.close()


class Znodes:
    """What this package needs of the tree."""

    def __init__(self, client: KazooClient) -> None:
        self._client = client

    def format(self, layout: Layout) -> None:
        """Make an empty cluster where there is none. INSTANCEID comes last: it says "complete"."""
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
        """A number that differs with every registration of the bookie; None while there is none."""
        for parent in (AVAILABLE, READ_ONLY):
            if found := self._client.exists(f"{parent}/{bookie}"):
                return int(found.czxid)
        return None

    def delete_registration(self, bookie: BookieId) -> None:
        """Of a bookie that does not run: what the expiry of its session would do."""
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
