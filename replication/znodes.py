"""The under-replication tree that we share with Java's nodes: its paths, and the bytes in it.

Names and payloads are those of BookKeeper's ZkLedgerUnderreplicationManager, ZkLedgerAuditorManager
and their protobuf messages. Never a field of ours in them: Java refuses a whole znode for one name
that it does not know. What is ours lies in ``own_state``.

What we keep in ZooKeeper for ourselves, below ``<ur>/bookmender``: versioned JSON.

``nodes/<uuid>`` one ephemeral znode a session (``membership``); ``waiting/<ledger id>`` why a
marked ledger is not being repaired now; ``orders/…`` what an operator wants (``orders``);
``ledgers/…`` a tree of marks like the shared one, of ledgers that Java would find whole (rule S16),
such as those of draining bookies; ``findings/<ledger id>`` what a check found wrong with a marked
one; ``given_up/<ledger id>`` entries that an operator gave up (``given_up``);
``recent_copies/<session>.<n>`` copies that are to be read again (``recent_copies``);
``unproven/<ledger id>`` why a ledger's end cannot be proven (``unproven_ends``); ``urgent`` the
leader's note of the most endangered (``urgent``); ``racks`` where bookies were last known to be
(``rack_memory``); ``activity`` at which bookies clients are active (``activity``);
``fsck/executors/<run>.<uuid>`` one ephemeral znode for each executor of fsck. What the auditor and
fsck keep for themselves beside these, their own modules say.

Java's payloads never carry a field of ours, so whatever it does not know of stands here. A reader
skips what it cannot read (but see ``orders``): it is a later release's, or a slip of somebody's
hand. All of it goes through ``parse_record`` and the helpers below it, so that no bytes whatever
make a session fall.
"""

import enum
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Any, NoReturn, TypeVar

import structlog

from ledgers.codec.bookkeeper_metadata_pb2 import (
    AuditorVoteFormat,
    CheckAllLedgersFormat,
    LedgerRereplicationLayoutFormat,
    LockDataFormat,
    UnderreplicatedLedgerFormat,
)
from ledgers.codec.protobuf import format_text, parse_binary, parse_text
from ledgers.errors import (
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    SettingsError,
    UnauthorizedError,
)
from ledgers.model import BookieId
from ledgers.store import MetadataStore, children_if_any

# --- Paths -----------------------------------------------------------------------------------------


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
        return f"{self.marks}/{_mark_directory(ledger_id)}/{_leaf(ledger_id)}"


@dataclass(frozen=True, slots=True)
class ClusterPaths(MarkPaths):
    """Paths of the znodes below ``<ledgers root>/underreplication``, Java's and bookmender's."""

    @classmethod
    def below(cls, ledgers_root: str) -> "ClusterPaths":
        return cls(f"{ledgers_root}/underreplication")

    # Shared with Java's nodes.

    @property
    def layout(self) -> str:
        return f"{self.directory}/LAYOUT"

    @property
    def locks(self) -> str:
        return f"{self.directory}/locks"

    def lock(self, ledger_id: int) -> str:
        return f"{self.locks}/{_leaf(ledger_id)}"

    @property
    def disable(self) -> str:
        """Automatic re-replication is off while this znode exists."""
        return f"{self.directory}/disable"

    @property
    def recovery_delay(self) -> str:
        return f"{self.directory}/lostBookieRecoveryDelay"

    @property
    def election(self) -> str:
        return f"{self.directory}/auditorelection"

    def audit_time(self, audit: "Audit") -> str:
        return f"{self.directory}/{audit.value}"

    # Private to bookmender.

    @property
    def private(self) -> MarkPaths:
        """bookmender's own directory, with the marks that Java's nodes do not see (rule S16)."""
        return MarkPaths(f"{self.directory}/bookmender")

    @property
    def nodes(self) -> str:
        return f"{self.directory}/bookmender/nodes"

    @property
    def waiting(self) -> str:
        return f"{self.directory}/bookmender/waiting"

    def waiting_note(self, ledger_id: int) -> str:
        return f"{self.waiting}/{ledger_id}"

    @property
    def orders(self) -> str:
        return f"{self.directory}/bookmender/orders"

    @property
    def draining_orders(self) -> str:
        return f"{self.orders}/draining"

    @property
    def maintenance_orders(self) -> str:
        return f"{self.orders}/maintenance"

    @property
    def findings(self) -> str:
        return f"{self.directory}/bookmender/findings"

    def finding(self, ledger_id: int) -> str:
        return f"{self.findings}/{ledger_id}"

    def given_up(self, ledger_id: int) -> str:
        return f"{self.directory}/bookmender/given_up/{ledger_id}"

    @property
    def unproven_ends(self) -> str:
        return f"{self.directory}/bookmender/unproven"

    def unproven_end(self, ledger_id: int) -> str:
        return f"{self.unproven_ends}/{ledger_id}"

    @property
    def recent_copies(self) -> str:
        return f"{self.directory}/bookmender/recent_copies"

    @property
    def urgent(self) -> str:
        return f"{self.directory}/bookmender/urgent"

    @property
    def racks(self) -> str:
        return f"{self.directory}/bookmender/racks"

    @property
    def activity(self) -> str:
        return f"{self.directory}/bookmender/activity"

    @property
    def identities(self) -> str:
        return f"{self.directory}/bookmender/identities"

    @property
    def absences(self) -> str:
        return f"{self.directory}/bookmender/absences"

    @property
    def causes(self) -> str:
        return f"{self.directory}/bookmender/causes"

    @property
    def drains(self) -> str:
        return f"{self.directory}/bookmender/drains"

    @property
    def last_audit(self) -> str:
        return f"{self.directory}/bookmender/audit"

    @property
    def ledger_map(self) -> str:
        return f"{self.directory}/bookmender/index"

    @property
    def checks(self) -> str:
        return f"{self.directory}/bookmender/checks"

    def check(self, name: str) -> str:
        return f"{self.checks}/{name}"

    @property
    def idle(self) -> str:
        return f"{self.directory}/bookmender/idle"

    @property
    def fsck_executors(self) -> str:
        return f"{self.directory}/bookmender/fsck/executors"

    @property
    def fsck_last(self) -> str:
        return f"{self.directory}/bookmender/fsck/last"

    @property
    def fsck_closer(self) -> str:
        return f"{self.directory}/bookmender/fsck/closer"


def ledger_id_of_lock(name: str) -> int | None:
    """The ledger that a child of ``locks`` stands for; None when it is no lock's name."""
    if not _LEAF.fullmatch(name):
        return None
    ledger_id = int(name.removeprefix("urL"))
    return ledger_id if ledger_id < 2**63 and _leaf(ledger_id) == name else None


def ledger_ids_below(parent: str, names: Iterable[str]) -> list[int]:
    """The ledgers whose private directories are the children ``names`` of a third-level directory.

    ``parent`` is relative to the marks' path, as in ``0000/0000/075b``. Such a directory holds one
    mark, or none that a crash left behind. Names that Java would not have put there are passed
    over.
    """
    ledger_ids = (
        int((parent + name).replace("/", ""), 16) for name in names if _GROUP.fullmatch(name)
    )
    return [ledger_id for ledger_id in ledger_ids if ledger_id < 2**63]


def _mark_directory(ledger_id: int) -> str:
    digits = f"{ledger_id:016x}"
    return "/".join(digits[start : start + 4] for start in range(0, 16, 4))


_GROUP = re.compile(r"[0-9a-f]{4}")
_LEAF = re.compile(r"urL[0-9]{10,19}")


def _leaf(ledger_id: int) -> str:
    assert 0 <= ledger_id < 2**63, ledger_id
    return f"urL{ledger_id:010d}"


# --- Marks, locks, votes ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a mark says: bookies found missing, and when. Without any: repair the placement.

    ``ctime_ms``: wall-clock, when it was made or last extended; None in marks of old versions.
    """

    replicas: tuple[BookieId, ...] = ()
    ctime_ms: int | None = None


@lru_cache(maxsize=1024)  # the marks of one loss are the same but for their milliseconds
def parse_mark(data: bytes) -> Mark:
    """Raises CorruptionError. Without data it is a mark without replicas."""
    message = parse_text(data, UnderreplicatedLedgerFormat)
    return Mark(
        replicas=tuple(map(BookieId, message.replica)),
        ctime_ms=message.ctime if message.HasField("ctime") else None,
    )


def mark_to_bytes(mark: Mark) -> bytes:
    return format_text(UnderreplicatedLedgerFormat(replica=mark.replicas, ctime=mark.ctime_ms))


def parse_lock(data: bytes) -> str | None:
    """Who holds the lock: for Java a host name, for people. Raises CorruptionError."""
    return parse_text(data, LockDataFormat).bookieId or None


def lock_to_bytes(holder: str) -> bytes:
    return format_text(LockDataFormat(bookieId=holder))


def parse_vote(data: bytes) -> str | None:
    """Who stands for election, or is elected; None when nobody was yet. Raises CorruptionError."""
    return parse_text(data, AuditorVoteFormat).bookieId or None


def vote_to_bytes(candidate: str) -> bytes:
    return format_text(AuditorVoteFormat(bookieId=candidate))


# --- The rest --------------------------------------------------------------------------------------

LAYOUT_DATA = format_text(LedgerRereplicationLayoutFormat(type="BASIC", version=1))


def check_layout(data: bytes) -> None:
    """Raises SettingsError when the tree is laid out in a way that we do not know, or
    CorruptionError."""
    layout = parse_text(data, LedgerRereplicationLayoutFormat)
    if (layout.type, layout.version) != ("BASIC", 1):
        raise SettingsError(
            "the under-replication tree is of a kind that is not supported; BASIC, version 1, is",
            type=layout.type,
            version=layout.version,
        )


def parse_recovery_delay(data: bytes) -> int:
    """Seconds before an absent bookie counts as lost. Raises CorruptionError."""
    if not re.fullmatch(rb"[0-9]{1,10}", data) or int(data) >= 2**31:
        raise CorruptionError("lostBookieRecoveryDelay is no number of seconds", data=data[:80])
    return int(data)


def recovery_delay_to_bytes(delay_s: int) -> bytes:
    assert 0 <= delay_s < 2**31, delay_s
    return str(delay_s).encode("ascii")


class Audit(enum.Enum):
    """The audits whose last time is kept. The value is the znode's name."""

    ALL_LEDGERS = "checkallledgersctime"
    PLACEMENT_POLICY = "placementpolicycheckctime"
    REPLICAS = "replicascheckctime"


def parse_audit_time(data: bytes) -> int | None:
    """Wall-clock milliseconds, None for never. Raises CorruptionError.

    Binary, not text. The messages of the three audits differ in names alone.
    """
    message = parse_binary(data, CheckAllLedgersFormat)
    is_known = message.HasField("checkAllLedgersCTime") and message.checkAllLedgersCTime >= 0
    return message.checkAllLedgersCTime if is_known else None


def audit_time_to_bytes(time_ms: int) -> bytes:
    return CheckAllLedgersFormat(checkAllLedgersCTime=time_ms).SerializeToString()


log = structlog.get_logger()
T = TypeVar("T")


# --- What stands in them ---------------------------------------------------------------------------

ACL_HINT = "have ZooKeeper's ACL of it allow this node all, or delete it: it is made anew"
RECORD_BYTES_MAX = 1 << 20
"""ZooKeeper's own bound, unless it was raised there."""
INT_MAX = 2**63 - 1
TIME_MS_MAX = 253_402_300_799_999
"""The end of the year 9999: the last that a calendar can show."""


async def read_record(
    store: MetadataStore, path: str, parse: Callable[[dict[str, Any]], T]
) -> T | None:
    """What ``parse`` makes of the record in a znode of ours. None where there is none, or none that
    it can read: a later release may have written it in another way.
    """
    try:
        data, _ = await store.get(path)
        return parse(parse_record(data))
    except (NoNodeError, CorruptionError):
        return None


async def read_if_allowed(
    store: MetadataStore, path: str, parse: Callable[[dict[str, Any]], T]
) -> T | None:
    """As ``read_record``, of what a leader can do without: it is as good as not there, too, where
    ACLs shut it away."""
    try:
        return await read_record(store, path, parse)
    except UnauthorizedError as error:
        log.warning("record.access_denied", path=path, error=str(error), next_step=ACL_HINT)
        return None


async def children_if_allowed(store: MetadataStore, path: str) -> list[str]:
    """Of the znodes below one of ours whose records can be done without: none where ACLs shut it
    away, too."""
    try:
        return await children_if_any(store, path)
    except UnauthorizedError as error:
        log.warning("record.access_denied", path=path, error=str(error), next_step=ACL_HINT)
        return []


async def ensure_znode(store: MetadataStore, path: str) -> None:
    """Create a persistent znode and its parents, unless it exists."""
    with suppress(NodeExistsError):
        await store.create(path, with_parents=True)


async def read_found_bad(
    store: MetadataStore, paths: ClusterPaths, ledger_id: int
) -> frozenset[BookieId]:
    """Bookies of which a check or fsck found bad copies of the ledger, one day: they count while it
    is marked for them."""
    path = paths.finding(ledger_id)
    named = await read_record(store, path, lambda finding: texts_field(finding, "bookies"))
    return frozenset(map(BookieId, named or ()))


def parse_record(data: bytes) -> dict[str, Any]:
    """The only parser of what is ours: a JSON object in UTF-8, without NaN or an infinity.

    Raises CorruptionError, whatever somebody's hand put there. The values are of any type:
    ``int_field``, ``text_field`` and the like read them.
    """
    if len(data) > RECORD_BYTES_MAX:
        raise CorruptionError("a record larger than any of ours", byte_count=len(data))
    try:
        record = json.loads(data.decode(), parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:  # the latter: nested a thousandfold
        raise CorruptionError("a record that is not JSON", data=data[:80]) from error
    if not isinstance(record, dict):
        raise CorruptionError("a record that is no JSON object", data=data[:80])
    return record


def int_field(record: Mapping[str, Any], key: str, *, least: int = 0, most: int = INT_MAX) -> int:
    """A whole number within the ends, both included. Raises CorruptionError."""
    return as_int(record.get(key), key, least=least, most=most)


def as_int(value: object, what: str, *, least: int = 0, most: int = INT_MAX) -> int:
    """Likewise, of a value that stands in no record of its own."""
    if type(value) is not int or not least <= value <= most:  # a bool is an int to isinstance
        raise CorruptionError(f"a record whose {what} is no number from {least} to {most}")
    return value


def ints_field(record: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """An array of them. Raises CorruptionError."""
    values = record.get(key)
    if not isinstance(values, list):
        raise CorruptionError(f"a record whose {key} is no array")
    return tuple(as_int(value, f"item of {key}") for value in values)


def time_field(record: Mapping[str, Any], key: str) -> int:
    """Wall-clock milliseconds. Raises CorruptionError."""
    return int_field(record, key, most=TIME_MS_MAX)


def text_field(record: Mapping[str, Any], key: str) -> str:
    """Raises CorruptionError."""
    return as_text(record.get(key), key)


def texts_field(record: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """An array of them. Raises CorruptionError."""
    values = record.get(key)
    if not isinstance(values, list):
        raise CorruptionError(f"a record whose {key} is no array")
    return tuple(as_text(value, f"item of {key}") for value in values)


def as_text(value: object, what: str) -> str:
    """Text that can be written again: JSON may hold half a character. Raises CorruptionError."""
    if not isinstance(value, str) or not _is_utf8(value):
        raise CorruptionError(f"a record whose {what} is no text")
    return value


def bool_field(record: Mapping[str, Any], key: str) -> bool:
    """Raises CorruptionError."""
    value = record.get(key)
    if not isinstance(value, bool):
        raise CorruptionError(f"a record whose {key} is neither true nor false")
    return value


def object_field(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object within it. Raises CorruptionError."""
    value = record.get(key)
    if not isinstance(value, dict):
        raise CorruptionError(f"a record whose {key} is no object")
    return value


def ledger_id_of_name(name: str) -> int | None:
    """The ledger whose decimal id a znode's name is; None when it is no such name."""
    if not _LEDGER_ID.fullmatch(name):
        return None
    ledger_id = int(name)
    return ledger_id if ledger_id <= INT_MAX else None


_LEDGER_ID = re.compile(r"0|[1-9][0-9]{0,18}")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not isfinite(number):
        raise ValueError("a number beyond all bounds")
    return number


def _is_utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
