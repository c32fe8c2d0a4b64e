"""The znodes below ``<ledgers root>/underreplication``: their paths, and the bytes in them.

``ClusterPaths`` lists every path. Two kinds of znodes live there:

- Znodes shared with Java's nodes. Their names and payloads are those of BookKeeper's
  ZkLedgerUnderreplicationManager, ZkLedgerAuditorManager and their protobuf messages. They never
  carry a field of ours, because Java rejects a whole znode for one name that it does not know.
  Pulsar's metadata driver has the same ones, except for the election (``auditor.election``).
- Private znodes below ``bookmender``: versioned JSON. ``records`` reads and writes them.
"""

import enum
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from ledgers.codec.bookkeeper_metadata_pb2 import (
    AuditorVoteFormat,
    CheckAllLedgersFormat,
    LedgerRereplicationLayoutFormat,
    LockDataFormat,
    UnderreplicatedLedgerFormat,
)
from ledgers.codec.protobuf import format_text, parse_binary, parse_text
from ledgers.errors import CorruptionError, NodeExistsError, SettingsError
from ledgers.model import BookieId
from ledgers.store import MetadataStore
from ledgers.typed import decode_json

# --- Paths ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MarkPaths:
    """Paths of a tree of marks: the one shared with Java's nodes, or bookmender's private one."""

    directory: str
    """The parent of the znode ``ledgers`` below which the marks are."""

    @property
    def marks(self) -> str:
        return f"{self.directory}/ledgers"

    def mark(self, ledger_id: int) -> str:
        """Four levels of the id's hexadecimal digits, and a leaf with its decimal digits."""
        digits = f"{ledger_id:016x}"
        directory = "/".join(digits[start : start + 4] for start in range(0, 16, 4))
        return f"{self.marks}/{directory}/{_leaf(ledger_id)}"


class _Path:
    """An attribute of ``ClusterPaths``: a path below its directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: MarkPaths, owner: type) -> str:
        return f"{paths.directory}/{self._name}"


@dataclass(frozen=True, slots=True)
class ClusterPaths(MarkPaths):
    """Paths of the znodes below ``<ledgers root>/underreplication``, Java's and bookmender's."""

    @classmethod
    def below(cls, ledgers_root: str) -> "ClusterPaths":
        return cls(f"{ledgers_root}/underreplication")

    # Shared with Java's nodes.

    layout = _Path("LAYOUT")
    locks = _Path("locks")
    disable = _Path("disable")
    """Automatic re-replication is off while this znode exists."""
    recovery_delay = _Path("lostBookieRecoveryDelay")
    election = _Path("auditorelection")
    pulsar_leader = _Path("leader")
    """The leading auditor, for Pulsar's metadata driver. An ephemeral znode."""

    def lock(self, ledger_id: int) -> str:
        return f"{self.locks}/{_leaf(ledger_id)}"

    def audit_time(self, audit: "Audit") -> str:
        return f"{self.directory}/{audit.value}"

    # Private to bookmender.

    @property
    def private(self) -> MarkPaths:
        """The private directory. Java's nodes do not see the marks in it (rule S16)."""
        return MarkPaths(f"{self.directory}/bookmender")

    nodes = _Path("bookmender/nodes")
    """One ephemeral znode for each session (``nodes``)."""
    waiting = _Path("bookmender/waiting")
    """Notes: why a ledger is not repaired now, or its end not proven (``ledger_record``)."""
    orders = _Path("bookmender/orders")
    """Operators' orders (``orders``)."""
    draining_orders = _Path("bookmender/orders/draining")
    maintenance_orders = _Path("bookmender/orders/maintenance")
    findings = _Path("bookmender/findings")
    """What a check or fsck found wrong with a marked ledger."""
    given_up_entries = _Path("bookmender/given_up")
    """Entries that an operator gave up when closing a ledger."""
    recent_copies = _Path("bookmender/recent_copies")
    """New copies that must be read again (``recent_copies``)."""
    urgent = _Path("bookmender/urgent")
    """The leader's list of the most urgent ledgers (``marks``)."""
    racks = _Path("bookmender/racks")
    """The last known rack of each bookie (``racks``)."""
    activity = _Path("bookmender/activity")
    """Bookies with active clients (``client_activity``)."""
    identities = _Path("bookmender/identities")
    absences = _Path("bookmender/absences")
    losses = _Path("bookmender/losses")
    drains = _Path("bookmender/drains")
    last_audit = _Path("bookmender/audit")
    progress = _Path("bookmender/progress")
    """What is left to repair, and the course of it (``auditor.backlog``)."""
    ledger_map = _Path("bookmender/ledger_map")
    checks = _Path("bookmender/checks")
    idle = _Path("bookmender/idle")
    history = _Path("bookmender/history")
    """Segments of events, one or more for each session (``history``)."""
    feed = _Path("bookmender/feed")
    """The change feed: whether it is on, and its ledgers in order (``checkpoints.chain``)."""
    feed_state = _Path("bookmender/feed-state")
    """Why the change feed is stalled, as its leader sees it (``checkpoints.stalls``)."""
    feed_clients = _Path("bookmender/feed-clients")
    """One znode for each client of the feed whose receipts are in ZooKeeper."""
    feed_followers = _Path("bookmender/feed-followers")
    """One ephemeral znode for each client of the feed that is connected."""
    feed_watchers = _Path("bookmender/feed-watchers")
    """Ephemeral znodes of programs that must know how old the last checkpoint is. While there is
    one, an empty checkpoint follows every few seconds without changes."""
    notify = _Path("bookmender/notify")
    """One ephemeral znode for each server of notifications (``notifications.discovery``)."""
    archive = _Path("bookmender/archive")
    """The order to archive all metadata (``archive.order``)."""
    archive_state = _Path("bookmender/archive-state")
    archiver = _Path("bookmender/feed-watchers/archive")
    """The node that archives."""
    objects = _Path("bookmender/objects")
    """The objects that applications publish, in buckets (``notifications.objects``)."""
    object_batches = _Path("bookmender/object-batches")
    """The last publications, in order."""
    fsck_executors = _Path("bookmender/fsck/executors")
    """One ephemeral znode for each executor of fsck, ``<run>.<uuid>``."""
    fsck_last = _Path("bookmender/fsck/last")
    fsck_closer = _Path("bookmender/fsck/closer")

    def waiting_note(self, ledger_id: int) -> str:
        return f"{self.waiting}/{ledger_id}"

    def finding(self, ledger_id: int) -> str:
        return f"{self.findings}/{ledger_id}"

    def given_up(self, ledger_id: int) -> str:
        return f"{self.given_up_entries}/{ledger_id}"

    def check(self, name: str) -> str:
        return f"{self.checks}/{name}"


def ledger_id_of_lock(name: str) -> int | None:
    """Return the ledger that a child of ``locks`` belongs to. None: the name is not a lock's."""
    if not _LEAF.fullmatch(name):
        return None
    ledger_id = int(name.removeprefix("urL"))
    return ledger_id if ledger_id < 2**63 and _leaf(ledger_id) == name else None


def ledger_ids_below(parent: str, names: Iterable[str]) -> list[int]:
    """Return the ledgers whose directories are the children ``names`` of a third-level directory.

    ``parent`` is relative to the marks' path, as in ``0000/0000/075b``. Such a directory holds
    one mark, or none if a crash left it behind. Names that Java would not create are ignored.
    """
    ledger_ids = (
        int((parent + name).replace("/", ""), 16) for name in names if _GROUP.fullmatch(name)
    )
    return [ledger_id for ledger_id in ledger_ids if ledger_id < 2**63]


_GROUP = re.compile(r"[0-9a-f]{4}")
_LEAF = re.compile(r"urL[0-9]{10,19}")


def _leaf(ledger_id: int) -> str:
    assert 0 <= ledger_id < 2**63, ledger_id
    return f"urL{ledger_id:010d}"


# --- Marks, locks, votes --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The content of a mark: bookies found missing, and when. Without bookies: repair the
    placement.

    ``ctime_ms``: wall-clock time at which the mark was created or last extended; None in marks of
    old versions.
    """

    replicas: tuple[BookieId, ...] = ()
    ctime_ms: int | None = None


@lru_cache(maxsize=1024)  # the marks of one loss differ only in their milliseconds
def parse_mark(data: bytes) -> Mark:
    """Parse a mark; empty data is a mark without bookies. Raises CorruptionError."""
    message = parse_text(data, UnderreplicatedLedgerFormat)
    return Mark(
        replicas=tuple(map(BookieId, message.replica)),
        ctime_ms=message.ctime if message.HasField("ctime") else None,
    )


def mark_to_bytes(mark: Mark) -> bytes:
    return format_text(UnderreplicatedLedgerFormat(replica=mark.replicas, ctime=mark.ctime_ms))


def parse_lock(data: bytes) -> str | None:
    """Return the holder of the lock, a host name for people. Raises CorruptionError."""
    return parse_text(data, LockDataFormat).bookieId or None


def lock_to_bytes(holder: str) -> bytes:
    return format_text(LockDataFormat(bookieId=holder))


def parse_vote(data: bytes) -> str | None:
    """Return the candidate, or the elected auditor; None if there is none. Raises
    CorruptionError."""
    return parse_text(data, AuditorVoteFormat).bookieId or None


def vote_to_bytes(candidate: str) -> bytes:
    return format_text(AuditorVoteFormat(bookieId=candidate))


_OURS = "bookmender-"
"""Prefix of our nodes in Pulsar's election. A node of Pulsar's driver deletes the znode of another
session if the value is its own bookie id (``LeaderElectionImpl.handleExistingLeaderValue``)."""


def parse_pulsar_leader(data: bytes) -> str:
    """Return the leader: a bookie id, or the candidate of our node. Raises CorruptionError."""
    try:
        return decode_json(data, str).removeprefix(_OURS)
    except msgspec.DecodeError as error:
        raise CorruptionError("the leader is not a JSON string", data=data[:80]) from error


def is_our_leader(data: bytes) -> bool:
    """Return True if a bookmender node wrote this value."""
    return data.startswith(f'"{_OURS}'.encode())


def pulsar_leader_to_bytes(candidate: str) -> bytes:
    """Return the value for our node. Pulsar's driver reads it as a JSON string with a bookie id."""
    return msgspec.json.encode(_OURS + candidate)


# --- The rest -------------------------------------------------------------------------------------

LAYOUT_DATA = format_text(LedgerRereplicationLayoutFormat(type="BASIC", version=1))


def check_layout(data: bytes) -> None:
    """Raise SettingsError if the layout is unknown, CorruptionError if the data is unreadable."""
    layout = parse_text(data, LedgerRereplicationLayoutFormat)
    if (layout.type, layout.version) != ("BASIC", 1):
        raise SettingsError(
            "the format of the under-replication tree is not supported; only BASIC, version 1, is",
            type=layout.type,
            version=layout.version,
        )


def parse_recovery_delay(data: bytes) -> int:
    """Return the seconds after which an absent bookie is lost. Raises CorruptionError."""
    if not re.fullmatch(rb"[0-9]{1,10}", data) or int(data) >= 2**31:
        raise CorruptionError("lostBookieRecoveryDelay is not a number of seconds", data=data[:80])
    return int(data)


def recovery_delay_to_bytes(delay_s: int) -> bytes:
    assert 0 <= delay_s < 2**31, delay_s
    return str(delay_s).encode("ascii")


class Audit(enum.Enum):
    """The audits whose last time is stored for Java. The value is the znode's name."""

    ALL_LEDGERS = "checkallledgersctime"
    PLACEMENT_POLICY = "placementpolicycheckctime"
    REPLICAS = "replicascheckctime"


def parse_audit_time(data: bytes) -> int | None:
    """Return the wall-clock milliseconds of the last audit, None for never. Raises CorruptionError.
    The payload is binary, not text. The messages of the three audits differ only in their names."""
    message = parse_binary(data, CheckAllLedgersFormat)
    is_known = message.HasField("checkAllLedgersCTime") and message.checkAllLedgersCTime >= 0
    return message.checkAllLedgersCTime if is_known else None


def audit_time_to_bytes(time_ms: int) -> bytes:
    return CheckAllLedgersFormat(checkAllLedgersCTime=time_ms).SerializeToString()


# --- Private records ------------------------------------------------------------------------------

ACL_HINT = (
    "grant this node all permissions in the znode's ACL, or delete the znode; it is created again"
)
RECORD_BYTES_MAX = 1 << 20
"""ZooKeeper's default limit of a znode."""
INT_MAX = 2**63 - 1
TIME_MS_MAX = 253_402_300_799_999
"""The end of the year 9999, the last that Python's datetime can show."""


async def ensure_znode(store: MetadataStore, path: str) -> None:
    """Create a persistent znode and its parents, unless it exists."""
    with suppress(NodeExistsError):
        await store.create(path, with_parents=True)


def ledger_id_of_name(name: str) -> int | None:
    """Return the ledger whose decimal id is the znode's name; None for other names."""
    if not _LEDGER_ID.fullmatch(name):
        return None
    ledger_id = int(name)
    return ledger_id if ledger_id <= INT_MAX else None


_LEDGER_ID = re.compile(r"0|[1-9][0-9]{0,18}")
