"""What we keep in ZooKeeper for ourselves, below ``<ur>/bookmender``: versioned JSON.

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

import json
import re
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, NoReturn, TypeVar

import structlog

from ledgers.errors import CorruptionError, NoNodeError, UnauthorizedError
from ledgers.metadata import BookieId
from ledgers.store import MetadataStore, children_if_any

log = structlog.get_logger()
T = TypeVar("T")


def own_path(ur: str) -> str:
    return f"{ur}/bookmender"


def nodes_path(ur: str) -> str:
    return f"{own_path(ur)}/nodes"


def waiting_path(ur: str, ledger_id: int | None = None) -> str:
    parent = f"{own_path(ur)}/waiting"
    return parent if ledger_id is None else f"{parent}/{ledger_id}"


def orders_path(ur: str) -> str:
    return f"{own_path(ur)}/orders"


def racks_path(ur: str) -> str:
    return f"{own_path(ur)}/racks"


def urgent_path(ur: str) -> str:
    return f"{own_path(ur)}/urgent"


def findings_path(ur: str, ledger_id: int | None = None) -> str:
    parent = f"{own_path(ur)}/findings"
    return parent if ledger_id is None else f"{parent}/{ledger_id}"


def recent_copies_path(ur: str) -> str:
    return f"{own_path(ur)}/recent_copies"


def fsck_executors_path(ur: str) -> str:
    return f"{own_path(ur)}/fsck/executors"


# --- What stands in them ---------------------------------------------------------------------------

OPEN_UP = "have ZooKeeper's ACL of it allow this node all, or delete it: it is made anew"
RECORD_BYTES_MAX = 1 << 20
"""ZooKeeper's own bound, unless it was raised there."""
WHOLE_MAX = 2**63 - 1
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


async def read_aid(
    store: MetadataStore, path: str, parse: Callable[[dict[str, Any]], T]
) -> T | None:
    """As ``read_record``, of what a leader can do without: it is as good as not there, too, where
    ACLs shut it away."""
    try:
        return await read_record(store, path, parse)
    except UnauthorizedError as error:
        log.warning("record.shut_away", path=path, error=str(error), next_step=OPEN_UP)
        return None


async def names_in(store: MetadataStore, path: str) -> list[str]:
    """Of the znodes below one of ours whose records can be done without: none where ACLs shut it
    away, too."""
    try:
        return await children_if_any(store, path)
    except UnauthorizedError as error:
        log.warning("record.shut_away", path=path, error=str(error), next_step=OPEN_UP)
        return []


async def read_found_bad(store: MetadataStore, ur: str, ledger_id: int) -> frozenset[BookieId]:
    """Bookies of which a check or fsck found bad copies of the ledger, one day: they count while it
    is marked for them."""
    path = findings_path(ur, ledger_id)
    named = await read_record(store, path, lambda finding: texts(finding, "bookies"))
    return frozenset(map(BookieId, named or ()))


def parse_record(data: bytes) -> dict[str, Any]:
    """The only parser of what is ours: a JSON object in UTF-8, without NaN or an infinity.

    Raises CorruptionError, whatever somebody's hand put there. The values are of any type:
    ``whole``, ``text`` and ``switch`` take them out.
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


def whole(record: Mapping[str, Any], key: str, *, least: int = 0, most: int = WHOLE_MAX) -> int:
    """A whole number within the ends, both included. Raises CorruptionError."""
    return as_whole(record.get(key), key, least=least, most=most)


def as_whole(value: object, what: str, *, least: int = 0, most: int = WHOLE_MAX) -> int:
    """Likewise, of a value that stands in no record of its own."""
    if type(value) is not int or not least <= value <= most:  # a bool is an int to isinstance
        raise CorruptionError(f"a record whose {what} is no number from {least} to {most}")
    return value


def wholes(record: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """An array of them. Raises CorruptionError."""
    values = record.get(key)
    if not isinstance(values, list):
        raise CorruptionError(f"a record whose {key} is no array")
    return tuple(as_whole(value, f"item of {key}") for value in values)


def time_ms(record: Mapping[str, Any], key: str) -> int:
    """Wall-clock milliseconds. Raises CorruptionError."""
    return whole(record, key, most=TIME_MS_MAX)


def text(record: Mapping[str, Any], key: str) -> str:
    """Raises CorruptionError."""
    return as_text(record.get(key), key)


def texts(record: Mapping[str, Any], key: str) -> tuple[str, ...]:
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


def switch(record: Mapping[str, Any], key: str) -> bool:
    """Raises CorruptionError."""
    value = record.get(key)
    if not isinstance(value, bool):
        raise CorruptionError(f"a record whose {key} is neither true nor false")
    return value


def part(record: Mapping[str, Any], key: str) -> dict[str, Any]:
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
    return ledger_id if ledger_id <= WHOLE_MAX else None


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
