"""The under-replication tree that we share with Java's nodes: its paths, and the bytes in it.

Names and payloads are those of BookKeeper's ZkLedgerUnderreplicationManager, ZkLedgerAuditorManager
and their protobuf messages. Never a field of ours in them: Java refuses a whole znode for one name
that it does not know. What is ours lies in ``own_state``. ``ur`` is the tree's root throughout.
"""

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from ledgers.errors import CorruptionError, SettingsError
from ledgers.formats.bookkeeper_metadata_pb2 import (
    AuditorVoteFormat,
    CheckAllLedgersFormat,
    LedgerRereplicationLayoutFormat,
    LockDataFormat,
    UnderreplicatedLedgerFormat,
)
from ledgers.formats.protobuf import format_text, parse_binary, parse_text
from ledgers.metadata import BookieId

# --- Paths -----------------------------------------------------------------------------------------


def underreplication_path(root: str) -> str:
    """``ur``, below the ledgers root path."""
    return f"{root}/underreplication"


def layout_path(ur: str) -> str:
    return f"{ur}/LAYOUT"


def marks_path(ur: str) -> str:
    return f"{ur}/ledgers"


def mark_path(ur: str, ledger_id: int) -> str:
    """Four levels of the id's hexadecimal digits, and a leaf with its decimal ones."""
    return f"{marks_path(ur)}/{_mark_directory(ledger_id)}/{_leaf(ledger_id)}"


def locks_path(ur: str) -> str:
    return f"{ur}/locks"


def lock_path(ur: str, ledger_id: int) -> str:
    return f"{locks_path(ur)}/{_leaf(ledger_id)}"


def disable_path(ur: str) -> str:
    """Automatic re-replication is off while this znode exists."""
    return f"{ur}/disable"


def recovery_delay_path(ur: str) -> str:
    return f"{ur}/lostBookieRecoveryDelay"


def election_path(ur: str) -> str:
    return f"{ur}/auditorelection"


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


def audit_time_path(ur: str, audit: Audit) -> str:
    return f"{ur}/{audit.value}"


def parse_audit_time(data: bytes) -> int | None:
    """Wall-clock milliseconds, None for never. Raises CorruptionError.

    Binary, not text. The messages of the three audits differ in names alone.
    """
    message = parse_binary(data, CheckAllLedgersFormat)
    is_known = message.HasField("checkAllLedgersCTime") and message.checkAllLedgersCTime >= 0
    return message.checkAllLedgersCTime if is_known else None


def audit_time_to_bytes(time_ms: int) -> bytes:
    return CheckAllLedgersFormat(checkAllLedgersCTime=time_ms).SerializeToString()
