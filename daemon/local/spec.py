"""The description of a local cluster, kept in its data folder and used at each start."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from daemon.local.jars import BOOKKEEPER_DEFAULT
from daemon.local.ports import LOOPBACK, free_ports
from ledgers.codec.layout import Layout
from ledgers.errors import SettingsError
from ledgers.model import BookieId
from ledgers.plain_files import in_place
from ledgers.typed import decode_json

FILE_NAME = "cluster.json"
FILE_VERSION = 1
LEDGERS_ROOT = "/ledgers"
BOOKIES_DEFAULT = 5
TICK_MS = 500
"""ZooKeeper rounds session timeouts up to ticks. The shortest timeout is two ticks."""


class Storage(enum.Enum):
    """The entry storage of a bookie."""

    SORTED = "sorted"
    INTERLEAVED = "interleaved"
    DB = "db"

    @property
    def java_class(self) -> str:
        return {
            Storage.SORTED: "org.apache.bookkeeper.bookie.SortedLedgerStorage",
            Storage.INTERLEAVED: "org.apache.bookkeeper.bookie.InterleavedLedgerStorage",
            Storage.DB: "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage",
        }[self]


URI_TYPES = {
    Layout.FLAT: "flat",
    Layout.LEGACY_HIERARCHICAL: "null",  # it has no name there; null means "as LAYOUT says"
    Layout.HIERARCHICAL: "hierarchical",
    Layout.LONG_HIERARCHICAL: "longhierarchical",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Everything that is needed to start the same cluster again. The port of a bookie is part of
    its id and never changes."""

    version: int = FILE_VERSION
    bookkeeper: str = BOOKKEEPER_DEFAULT
    storage: Storage = Storage.SORTED
    layout: Layout = Layout.HIERARCHICAL
    session_timeout_s: float = 10.0
    """The bookies' ZooKeeper session timeout: how long a killed bookie stays registered."""
    bookie_settings: Mapping[str, str] = field(default_factory=dict)
    """Additional lines for the bookies' settings files. They override the defaults."""
    bookie_jvm_flags: tuple[str, ...] = ()
    """Additional flags for the bookies' JVMs, which override the defaults that keep them small:
    e.g. ``-Xmx256m``."""
    zookeeper_settings: Mapping[str, str] = field(default_factory=dict)
    """Additional lines for ZooKeeper's settings file, e.g. ``secureClientPort``."""
    zookeeper_jvm_flags: tuple[str, ...] = ()
    """Additional flags for ZooKeeper's JVM."""
    zookeeper_port: int
    zookeeper_tls_port: int | None = None
    """None: the cluster has no TLS, SASL and ACLs."""
    bookie_ports: tuple[int, ...]

    @property
    def metadata_service_uri(self) -> str:
        port = self.zookeeper_tls_port or self.zookeeper_port
        return f"zk+{URI_TYPES[self.layout]}://{LOOPBACK}:{port}{LEDGERS_ROOT}"

    @property
    def is_secured(self) -> bool:
        """Return True if all clients need TLS and a user. Only this package uses the port without
        TLS."""
        return self.zookeeper_tls_port is not None

    @property
    def zookeeper_address(self) -> str:
        """``host:port``, in the form that ZooKeeper clients use."""
        return f"{LOOPBACK}:{self.zookeeper_port}"

    @property
    def bookies(self) -> tuple[BookieId, ...]:
        return tuple(bookie_id(port) for port in self.bookie_ports)

    @classmethod
    def load(cls, data: Path) -> "ClusterSpec | None":
        """Return the spec saved in the folder; None if the folder never held a cluster. Raises
        SettingsError if it is unreadable."""
        path = data / FILE_NAME
        try:
            return decode_json(path.read_bytes(), cls)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise SettingsError(f"cannot read {path}: {error}") from error

    def save(self, data: Path) -> None:
        """Write the spec to the folder, atomically."""
        try:
            with in_place(data / FILE_NAME) as file:
                file.write(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
        except OSError as error:  # for example a full disk
            raise SettingsError(
                f"{data / FILE_NAME} cannot be written: {error.strerror}"
            ) from error

    def __post_init__(self) -> None:
        if self.version != FILE_VERSION:
            raise ValueError(f"written by another release (version {self.version})")


def settle(
    saved: ClusterSpec | None,
    *,
    bookie_count: int | None,
    asked: Mapping[str, object],
    is_secured: bool = False,
) -> ClusterSpec:
    """Return the spec to start: fields from ``asked``, else the saved ones, else the defaults.

    ``is_secured``: False keeps what is saved. A larger ``bookie_count`` than the saved one adds
    bookies. Raises SettingsError if the existing data does not fit what is asked.
    """
    is_new = saved is None
    if saved is None:
        port, tls_port, *others = free_ports(2 + (bookie_count or BOOKIES_DEFAULT))
        saved = ClusterSpec(
            zookeeper_port=port,
            zookeeper_tls_port=tls_port if is_secured else None,
            bookie_ports=tuple(others),
        )
    missing = (bookie_count or len(saved.bookie_ports)) - len(saved.bookie_ports)
    for what, differs in (
        (f"of {len(saved.bookie_ports)} bookies", missing < 0),
        ("without TLS and SASL", is_secured and not saved.is_secured),
        (
            f"with storage {saved.storage.value}",
            asked.get("storage", saved.storage) != saved.storage,
        ),
        (
            f"with layout {saved.layout.name.lower()}",
            asked.get("layout", saved.layout) != saved.layout,
        ),
    ):
        if differs and not is_new:
            raise SettingsError(
                f"this data folder holds a cluster {what}; for another one use another folder "
                "(--data)"
            )
    saved = replace(saved, bookie_ports=saved.bookie_ports + free_ports(missing))
    spec = replace(saved, **cast(dict[str, Any], asked))
    if spec.session_timeout_s * 1000 < 2 * TICK_MS:
        raise SettingsError(f"a session timeout is at least {2 * TICK_MS / 1000:g} s")
    return spec


def find_bookie(bookies: Sequence[BookieId], name: str) -> BookieId:
    """Return the bookie with this id, this port, or this place in the list, counted from 1. Raises
    SettingsError."""
    for place, bookie in enumerate(bookies, start=1):
        if name in (bookie, str(port_of(bookie)), str(place)):
            return bookie
    known = ", ".join(f"{place}: {bookie}" for place, bookie in enumerate(bookies, start=1))
    raise SettingsError(f"there is no bookie {name}, only {known}")


def bookie_id(port: int) -> BookieId:
    return BookieId(f"{LOOPBACK}:{port}")


def port_of(bookie: BookieId) -> int:
    return int(bookie.rpartition(":")[2])
