"""Names where ledger metadata is stored: layouts, znode paths, the content of LAYOUT, the service
URI.

Names and text only; ``manager`` walks the tree with them. A layout is what BookKeeper calls a
ledger manager. ``root`` is always the path of the ledgers root, ``/ledgers`` unless configured
otherwise.
"""

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ledgers.errors import CorruptionError, SettingsError

SHORT_ID_STOP = 2**31 - 1
"""Ledger ids from here on are in the long subtree. Flat and legacy layouts cannot hold them."""
LONG_ID_STOP = 2**63


class Layout(enum.Enum):
    """A mapping of ledgers to znodes. The value is the end of Java's factory class name."""

    FLAT = "FlatLedgerManagerFactory"
    LEGACY_HIERARCHICAL = "LegacyHierarchicalLedgerManagerFactory"
    HIERARCHICAL = "HierarchicalLedgerManagerFactory"
    """The default: ids below 2^31 - 1 as in the legacy layout, the others as in the long one."""
    LONG_HIERARCHICAL = "LongHierarchicalLedgerManagerFactory"

    def path(self, root: str, ledger_id: int) -> str:
        """Return the path of the ledger's znode. Raises SettingsError if the id does not fit."""
        if self is Layout.HIERARCHICAL and 0 <= ledger_id < SHORT_ID_STOP:  # nearly always
            return f"{root}/{_split(f'{ledger_id:010d}')}"
        if not 0 <= ledger_id < self.ledger_id_stop:
            raise SettingsError(
                f"ledger ids of this layout are 0 to {self.ledger_id_stop - 1}",
                ledger_id=ledger_id,
                layout=self.name,
            )
        if self is Layout.FLAT:
            return f"{root}/L{ledger_id:010d}"
        if self is Layout.LONG_HIERARCHICAL or ledger_id >= SHORT_ID_STOP:
            return f"{root}/{_split(f'{ledger_id:019d}')}"
        return f"{root}/{_split(f'{ledger_id:010d}')}"

    def ledger_id(self, root: str, path: str) -> int | None:
        """Return the id of the ledger at this path; None if the path is no ledger's."""
        digits = path[len(root) :].replace("/", "").replace("L", "")
        if not digits.isdecimal() or len(digits) > len(str(LONG_ID_STOP)):
            return None
        ledger_id = int(digits)
        is_its_own = ledger_id < self.ledger_id_stop and self.path(root, ledger_id) == path
        return ledger_id if is_its_own else None

    def ledgers_among(
        self, root: str, directory: str, names: Iterable[str]
    ) -> tuple[list[int], list[str]]:
        """Return the ledgers among a znode's children, in the given order, and all other names."""
        names = list(names)
        if directory == root:
            holds_ledgers = self is Layout.FLAT
        else:
            is_leaf = len(_digits(root, directory)) in (6, 15)
            holds_ledgers = is_leaf and self.is_parent(root, directory)
        if not holds_ledgers:
            return [], names
        allowed = self.ids_below(root, directory)
        digits, leaf = _digits(root, directory), _LEAF if directory != root else _FLAT_LEAF
        # One search for all names, which may be tens of thousands.
        numbers = leaf.findall("/".join(names))
        ledger_ids = [id_ for number in numbers if (id_ := int(digits + number)) in allowed]
        if len(ledger_ids) == len(names):
            return ledger_ids, []
        leaves = {self.path(root, ledger_id).rpartition("/")[2] for ledger_id in ledger_ids}
        return ledger_ids, [name for name in names if name not in leaves]

    def is_parent(self, root: str, path: str) -> bool:
        """Return True if this znode is ``root`` or a directory with ledgers at any depth."""
        if path == root:
            return True
        return path.startswith(f"{root}/") and any(
            parent.fullmatch(path, len(root) + 1) for parent in _PARENTS[self]
        )

    def ids_below(self, root: str, directory: str) -> range:
        """Return the ids of all ledgers that may lie below a directory, at any depth.
        ``directory``: the root, or a directory for which ``is_parent`` is true."""
        if directory == root:
            return range(self.ledger_id_stop)
        digits = _digits(root, directory)
        if len(digits) in (2, 6):
            size, least, stop = 10 ** (10 - len(digits)), 0, SHORT_ID_STOP
        else:
            size, stop = 10 ** (19 - len(digits)), self.ledger_id_stop
            least = SHORT_ID_STOP if self is Layout.HIERARCHICAL else 0
        return range(max(int(digits) * size, least), min((int(digits) + 1) * size, stop))

    @property
    def ledger_id_stop(self) -> int:
        """The first ledger id that the layout cannot hold."""
        is_long = self in (Layout.HIERARCHICAL, Layout.LONG_HIERARCHICAL)
        return LONG_ID_STOP if is_long else SHORT_ID_STOP


def _split(digits: str) -> str:
    """Return the path: groups of four digits from the right, the last one with an ``L``."""
    if len(digits) == 10:
        return f"{digits[:2]}/{digits[2:6]}/L{digits[6:]}"
    assert len(digits) == 19, digits
    return f"{digits[:3]}/{digits[3:7]}/{digits[7:11]}/{digits[11:15]}/L{digits[15:]}"


def _digits(root: str, directory: str) -> str:
    """Return the digits with which all ids below the directory begin."""
    return directory[len(root) + 1 :].replace("/", "")


_FLAT_LEAF, _LEAF = (re.compile(rf"(?:^|/)L([0-9]{{{count}}})(?![^/])") for count in (10, 4))
"""Match the digits of ledgers among names that are joined by slashes."""
_SHORT_PARENT = re.compile(r"[0-9]{2}(/[0-9]{4})?")
_LONG_PARENT = re.compile(r"[0-9]{3}(/[0-9]{4}){0,3}")
_PARENTS: dict[Layout, tuple[re.Pattern[str], ...]] = {
    Layout.FLAT: (),
    Layout.LEGACY_HIERARCHICAL: (_SHORT_PARENT,),
    Layout.HIERARCHICAL: (_SHORT_PARENT, _LONG_PARENT),
    Layout.LONG_HIERARCHICAL: (_LONG_PARENT,),
}

# --- The znode LAYOUT -----------------------------------------------------------------------------

_LAYOUT_CONTENT = re.compile(rb"([0-9]{1,9})\n([!-9;-~]{1,1000}):([0-9]{1,9})(?:\n.*)?", re.DOTALL)
"""As in Java, lines after the second are ignored, for example the empty one of an editor."""
_FIRST_FORMAT_NAMES = {"flat": Layout.FLAT, "hierarchical": Layout.HIERARCHICAL}
_PULSAR_CLASS_NAME = "org.apache.pulsar.metadata.bookkeeper.PulsarLedgerManagerFactory"
"""Its layout is BookKeeper's default (``PulsarLedgerManager.getLedgerPath``)."""


def parse_layout(data: bytes) -> Layout:
    """Return the layout that the content of LAYOUT names. Raises CorruptionError, SettingsError
    (not supported). Only the end of the class name counts: some applications relocate BookKeeper's
    classes."""
    match = _LAYOUT_CONTENT.fullmatch(data)
    if match is None:
        raise CorruptionError(
            "LAYOUT is not 'format, line feed, name, colon, version'", data=data[:80]
        )
    layout_format, name, version = int(match[1]), match[2].decode("ascii"), int(match[3])
    found = None
    if layout_format == 1:
        found = _FIRST_FORMAT_NAMES.get(name)
    elif layout_format == 2:
        found = next((each for each in Layout if name.endswith(_class_name(each))), None)
        if name.endswith(_PULSAR_CLASS_NAME):
            found = Layout.HIERARCHICAL
    if found is None or version != 1:
        raise SettingsError(
            "LAYOUT names a ledger manager that is not supported; only ZooKeeper's, version 1, are",
            layout_format=layout_format,
            name=name,
            version=version,
        )
    return found


def serialize_layout(layout: Layout) -> bytes:
    """Return the content of LAYOUT, as Java writes it."""
    return f"2\n{_class_name(layout)}:1".encode("ascii")


def _class_name(layout: Layout) -> str:
    return f"org.apache.bookkeeper.meta.{layout.value}"


# --- The metadata service URI ---------------------------------------------------------------------

_URI_LAYOUTS = {
    "flat": Layout.FLAT,
    "hierarchical": Layout.HIERARCHICAL,
    "legacyhierarchical": Layout.LEGACY_HIERARCHICAL,
    "longhierarchical": Layout.LONG_HIERARCHICAL,
    "null": None,
}
_HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\])(?::([0-9]{1,9}))?")
_ROOT = re.compile(r"(?:/[A-Za-z0-9._:@=+~-]+)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataUri:
    """Where the metadata of a cluster is stored. ``hosts``: ZooKeeper's connect string. ``layout``:
    None if the URI names none; else LAYOUT must agree (rule S8). ``pulsar_root``: the other root
    that the URI means for Pulsar's driver, or empty; ``manager.find_cluster`` decides."""

    hosts: str
    root: str
    layout: Layout | None = None
    pulsar_root: str = ""

    def __str__(self) -> str:
        """Return a URI that ``parse`` parses to this value."""
        if self.pulsar_root:
            return f"{_PULSAR_SCHEME}zk:{self.hosts}{self.root}"
        name = next(name for name, layout in _URI_LAYOUTS.items() if layout is self.layout)
        return f"zk+{name}://{self.hosts}{self.root}"

    @classmethod
    def parse(cls, uri: str) -> "MetadataUri":
        """Parse a metadata service URI, without surrounding blanks, and quotes as in environment
        files. Raises SettingsError, whose text explains the problem and what is allowed."""
        uri = uri.strip()
        if len(uri) >= 2 and uri[0] == uri[-1] and uri[0] in "'\"":
            uri = uri[1:-1].strip()
        scheme, has_scheme, place = uri.partition("://")
        if uri.lower().startswith(_PULSAR_SCHEME):
            return cls._parse_pulsar(uri)
        _refuse_other_store(uri, uri)
        kind, _, layout_name = scheme.lower().partition("+")
        if not has_scheme or kind != "zk":
            what = "it must begin with zk://, zk+<layout>:// or metadata-store:zk:"
            raise _bad_uri(uri, what)
        if scheme.endswith("+") or layout_name not in ("", *_URI_LAYOUTS):
            raise _bad_uri(
                uri, f"its layout must be one of {', '.join(_URI_LAYOUTS)} (null: read LAYOUT)"
            )
        hosts, slash, path = place.partition("/")
        return cls(
            hosts=_hosts(uri, hosts),
            root=_root(uri, slash + path),
            layout=_URI_LAYOUTS[layout_name or "null"],
        )

    @classmethod
    def _parse_pulsar(cls, uri: str) -> "MetadataUri":
        """Parse a URI of Pulsar's bookkeeper.conf, ``metadata-store:zk:HOSTS/PATH``; ``zk:`` may be
        left out.

        Pulsar's driver uses the path as a chroot, with the ledgers root ``/ledgers`` in it, because
        the URI is opaque to Java and its path is null
        (``AbstractMetadataDriver.resolveLedgersRootPath``). Many operators take the path for the
        ledgers root, as in BookKeeper's own URIs. So a path that ends with ``/ledgers`` may be
        either: ``root`` is the path, and ``pulsar_root`` the root that the driver would use.
        """
        place = uri[len(_PULSAR_SCHEME) :]
        _refuse_other_store(uri, place)
        if place.lower().startswith("zk:"):
            place = place[len("zk:") :]
        hosts, slash, path = place.removeprefix("//").partition("/")
        chroot = _root(uri, slash + path) if path else ""
        is_root = chroot.endswith("/ledgers")
        return cls(
            hosts=_hosts(uri, hosts),
            root=chroot if is_root else f"{chroot}/ledgers",
            pulsar_root=f"{chroot}/ledgers" if is_root else "",
        )


_PULSAR_SCHEME = "metadata-store:"
_OTHER_STORE = re.compile(r"(etcd|memory|oxia|rocksdb)[:+]", re.IGNORECASE)
"""The start of URIs of BookKeeper's and Pulsar's other metadata drivers."""


def _refuse_other_store(uri: str, place: str) -> None:
    if found := _OTHER_STORE.match(place):
        raise _bad_uri(
            uri, f"the metadata store {found[1].lower()} is not supported, only ZooKeeper is"
        )


def _hosts(uri: str, authority: str) -> str:
    hosts = authority.replace(";", ",").split(",")
    for host in hosts:
        match = _HOST.fullmatch(host)
        if match is None:
            raise _bad_uri(uri, f"{host!r} is not a host with an optional port")
        if match[1] is not None and not 0 < int(match[1]) < 65536:
            raise _bad_uri(uri, f"the port of {host!r} is not between 1 and 65535")
    return ",".join(hosts)


def _root(uri: str, path: str) -> str:
    root = path.rstrip("/")
    if not _ROOT.fullmatch(root) or {".", ".."} & set(root.split("/")[1:]):
        raise _bad_uri(uri, "its path must be that of the ledgers root")
    return root


def _bad_uri(uri: str, what: str) -> SettingsError:
    return SettingsError(
        f"wrong metadata service URI: {what}; an example: "
        "zk+hierarchical://host1:2181;host2:2181/ledgers",
        uri=uri,
    )
