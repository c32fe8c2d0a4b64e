"""Private records: a value in a znode below ``<ur>/bookmender``, as versioned JSON.

``Record`` encodes and checks a value, ``read_stored`` reads a znode and tells an absent record from
an unreadable one, and ``update_record`` changes a znode by compare-and-set.

Unreadable means that access is denied, or that the bytes are not what this release writes: an
operator edited them, or another release wrote them. Such a record stops nothing, and is never the
same as an absent one: it is logged once (denied access: once an hour), ``bookmender status`` shows
RECORD_UNREADABLE, and readers take the cautious side. Its writer replaces it when it has the data.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Generic, Self, TypeVar

import msgspec
import structlog

from ledgers import typed
from ledgers.errors import (
    BookmenderError,
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.store import (
    ANY_VERSION,
    Create,
    Delete,
    MetadataStore,
    Operation,
    SetData,
    Stat,
    children_if_any,
)
from replication.znodes import ACL_HINT, INT_MAX, RECORD_BYTES_MAX, TIME_MS_MAX, ensure_znode

log = structlog.get_logger()

VERSION = 1
"""Version of every record. It is raised when another release would misunderstand a record, and not
for fields that another release may ignore."""
TRIES_MAX = 5
DENIED_LOG_INTERVAL_S = 3_600.0
"""How often it is logged that access to the same znode is denied."""
REWRITE_HINT = "the daemon writes it again when it has the data; you may delete the znode"

Count = Annotated[int, msgspec.Meta(ge=0, le=INT_MAX)]
"""A count, or an id that is not negative."""
TimeMs = Annotated[int, msgspec.Meta(ge=0, le=TIME_MS_MAX)]
"""Wall-clock milliseconds."""

T = TypeVar("T")


class Record:
    """Base of the dataclasses that are stored. Their fields are the keys of the JSON object. A
    field that is None is left out, so it must have that default."""

    __slots__ = ()

    def to_json(self) -> bytes:
        fields: dict[str, object] = msgspec.to_builtins(self, order="deterministic")
        set_fields = {key: value for key, value in fields.items() if value is not None}
        return msgspec.json.encode({"version": VERSION, **set_fields})

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Return what ``to_json`` wrote. Raises CorruptionError for anything else."""
        return decode(data, cls)


class _Envelope(msgspec.Struct):
    version: int


def decode(data: bytes, kind: type[T]) -> T:
    """Decode a record. Keys that are no fields of ``kind`` are ignored. Raises CorruptionError."""
    version = decode_json(data, _Envelope).version
    if version != VERSION:
        raise CorruptionError(f"a record of version {version}, and this release reads {VERSION}")
    return decode_json(data, kind)


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode JSON that has no version. Raises CorruptionError."""
    if len(data) > RECORD_BYTES_MAX:
        raise CorruptionError(
            "the record is larger than any that bookmender writes", byte_count=len(data)
        )
    try:
        return typed.decode_json(data, kind)
    except (ValueError, RecursionError) as error:  # of msgspec, of UTF-8, and of deep nesting
        raise CorruptionError(f"an unreadable record: {error}", data=data[:80]) from error


# --- Reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Generic[T]):
    """A record as it was read. ``stat``: None if there is no znode. ``value``: None if there is no
    znode, or if the record is unreadable; then ``error`` says why."""

    value: T | None = None
    stat: Stat | None = None
    error: BookmenderError | None = None

    @property
    def version(self) -> int:
        """The version of the znode, which exists; ANY_VERSION if access is denied."""
        assert self.stat is not None
        return self.stat.version

    @property
    def is_unreadable(self) -> bool:
        return self.error is not None

    @property
    def permitted_value(self) -> T | None:
        """The value. Raises UnauthorizedError, for a caller that waits until the ACL is opened."""
        if isinstance(self.error, UnauthorizedError):
            raise self.error
        return self.value

    @property
    def is_corrupt(self) -> bool:
        """True if writing the record again helps. Where access is denied, it does not."""
        return isinstance(self.error, CorruptionError)


async def read_stored(store: MetadataStore, path: str, parse: Callable[[bytes], T]) -> Stored[T]:
    """Read a record, and log an unreadable one. Raises UnavailableError."""
    try:
        data, stat = await store.get(path)
    except NoNodeError:
        return Stored()
    except UnauthorizedError as error:
        log_denied(path)
        return Stored(stat=Stat(version=ANY_VERSION), error=error)
    try:
        return Stored(value=parse(data), stat=stat)
    except CorruptionError as error:
        _log_unreadable(path, stat.mzxid, str(error))
        return Stored(stat=stat, error=error)


async def read_record(store: MetadataStore, path: str, parse: Callable[[bytes], T]) -> T | None:
    """Return the record; None if it is absent or unreadable. Raises UnavailableError."""
    return (await read_stored(store, path, parse)).value


async def children_if_allowed(store: MetadataStore, path: str) -> list[str]:
    """Return the names of the records in a directory; none if it is missing or access is denied."""
    try:
        return await children_if_any(store, path)
    except UnauthorizedError:
        log_denied(path)
        return []


def log_denied(path: str) -> None:
    """Log that access to a private znode is denied, once an hour."""
    _log_denied(path, period=int(time.monotonic() // DENIED_LOG_INTERVAL_S))


@lru_cache(maxsize=1_000)  # a warning for each version of a znode, not for each reading
def _log_unreadable(path: str, mzxid: int, error: str) -> None:
    log.warning("record.unreadable", path=path, mzxid=mzxid, error=error, next_step=REWRITE_HINT)


@lru_cache(maxsize=1_000)  # workers read some records many times a second
def _log_denied(path: str, *, period: int) -> None:
    log.warning("record.access_denied", path=path, next_step=ACL_HINT)


# --- Writing --------------------------------------------------------------------------------------


async def update_record(
    store: MetadataStore,
    path: str,
    parse: Callable[[bytes], T],
    change: Callable[[T | None], Record | None],
    *,
    apply: Callable[[Operation], Awaitable[object]],
    known: Stored[T] | None = None,
    in_doubt: Callable[[], Awaitable[T | None]] | None = None,
) -> int | None:
    """Change a record by compare-and-set, and start over when another client was faster. Return the
    new version of its znode; None if there is none, or if it is not known.

    ``change``: returns the new record for the current one (None: absent or unreadable); None
    deletes the znode. ``apply``: applies one operation together with the guards of the caller.
    ``known``: what the caller believes is stored; saves the reading if it is right. ``in_doubt``:
    returns what an unreadable record counts as; by default it counts as absent. Raises what
    ``apply`` raises, and UnavailableError if other clients keep changing the record.
    """
    for _ in range(TRIES_MAX):
        stored = known or await read_stored(store, path, parse)
        known = None
        current = await in_doubt() if in_doubt and stored.is_unreadable else stored.value
        stat, new = stored.stat, change(current)
        operation: Operation
        if new is None:
            if stat is None:
                return None
            operation, version = Delete(path=path, version=stat.version), None
        elif stat is None:
            operation, version = Create(path=path, data=new.to_json()), 0
        else:
            operation = SetData(path=path, data=new.to_json(), version=stat.version)
            version = None if stat.version == ANY_VERSION else stat.version + 1
        try:
            await apply(operation)
            return version
        except (NodeExistsError, ConflictError):
            continue
        except NoNodeError:
            if isinstance(operation, Create):  # the first record, or the directory was deleted
                await ensure_znode(store, path.rpartition("/")[0])
    raise UnavailableError("other clients keep changing the record", path=path)
