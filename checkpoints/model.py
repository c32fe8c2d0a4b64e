"""Checkpoints: which objects changed, from which version to which.

An object is a ledger. Its *key* is bytes, so that other kinds of objects may follow. Its *version*
is the zxid of its last change: the mzxid of its znode. The version of a deletion is the zxid of the
deletion where ZooKeeper reports it, else an upper bound of it: the pzxid of the nearest parent that
exists. zxids order all changes of the cluster, so versions of different objects are comparable.

A *checkpoint* has one *span* for each object that changed since the checkpoint before. A span names
the version before and after; the versions between are left out. So a client that handles the
current state of each object in a span misses only intermediate states.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Callable, Container, Sequence
from typing import Final, NamedTuple, Protocol

from msgspec import Struct

Key = bytes
Version = int
CheckpointId = int

NO_CHECKPOINT: Final = 0
"""The id before the first checkpoint. Also the begin version of an object that did not exist."""


class LogId(NamedTuple):
    """Identifies a ledger of the log, also after ZooKeeper was restored from a backup.

    A restored ZooKeeper hands out ledger ids and zxids a second time. So neither a ledger id nor
    the id of a checkpoint tells whether the log is the one that a client followed.
    """

    ledger_id: int
    begun_ms: int
    previous_id: CheckpointId


_LEDGER = struct.Struct(">cQ")
_LEDGER_KIND: Final = b"L"


class Span(Struct, frozen=True, array_like=True, gc=False):
    """The change of one object within a checkpoint.

    ``begin``: its version before; 0 if it did not exist. ``end``: its version after, greater than
    ``begin``. ``fingerprint``: a hash of its metadata at ``end``, the "hashed version", from 0 to
    2^64 - 1; None if it was deleted.
    """

    key: Key
    begin: Version
    end: Version
    fingerprint: int | None

    @property
    def is_deleted(self) -> bool:
        return self.fingerprint is None


class Checkpoint(Struct, frozen=True, array_like=True):
    """All changes after ``previous_id`` up to ``id``.

    ``id``: the highest zxid that the checkpoint covers. Ids ascend. Every span ends after
    ``previous_id`` and not after ``id``; each object has at most one span. ``time_ms``: wall clock
    of the leader that made the checkpoint; it does not order checkpoints.
    """

    id: CheckpointId
    previous_id: CheckpointId
    time_ms: int
    spans: Sequence[Span] = ()


class CommittedVersion(Struct, frozen=True, array_like=True, gc=False):
    """The latest version of an object that a client is to process.

    ``time_ms``: of its checkpoint; None if the object is offered again after a failure.
    ``fingerprint``: as in ``Span``. None if the object was deleted, and if it is offered again
    after a failure. A client that processes it reads the present state, which may be later.
    """

    key: Key
    version: Version
    fingerprint: int | None
    is_deleted: bool
    time_ms: int | None = None

    @property
    def ledger_id(self) -> int | None:
        """The ledger; None if the object is no ledger."""
        return ledger_id_of(self.key)


def ledger_key(ledger_id: int) -> Key:
    """Return the key of a ledger. Keys of ledgers sort as their ids."""
    return _LEDGER.pack(_LEDGER_KIND, ledger_id)


def ledger_id_of(key: Key) -> int | None:
    """Return the ledger id of a key; None if the object is no ledger."""
    if len(key) != _LEDGER.size or not key.startswith(_LEDGER_KIND):
        return None
    return int(_LEDGER.unpack(key)[1])


SpanFilter = Callable[[Span], bool]
"""True for the changes that a client wants to see. The client acknowledges all others implicitly.

The span names object and versions only. A filter by bookies or custom metadata looks up the
metadata, which its caller must have at hand. A change that leaves the view, such as a ledger that
moves off a bookie, is seen only if the filter still says True for it.
"""


def only_ledgers(ledger_ids: Container[int]) -> SpanFilter:
    """Return a filter for these ledgers: a set of ids, or a ``range`` of them."""
    return lambda span: ledger_id_of(span.key) in ledger_ids


class CheckpointListener(Protocol):
    """Receives checkpoints in ascending order of their ids, each once."""

    async def receive_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Handle one checkpoint. The next one follows when this call returns."""
        ...


class CheckpointSource(Protocol):
    """Committed checkpoints, such as the log (``log``). A checkpoint is committed when it can no
    longer be lost."""

    def register_checkpoint_listener(self, listener: CheckpointListener) -> None:
        """Send the listener all checkpoints that are committed from now on.

        The listener receives every checkpoint that a later ``request_checkpoints`` does not
        return: there is no gap between the two. It may receive some that were returned as well.
        """
        ...

    def remove_checkpoint_listener(self, listener: CheckpointListener) -> None:
        """Send the listener nothing more."""
        ...

    def request_checkpoints(self, earliest_time_ms: int) -> AsyncGenerator[Checkpoint, None]:
        """Yield the committed checkpoints back to this time, latest first.

        Use it within ``contextlib.aclosing``: a caller may stop early. Retention may have deleted
        some of them; see ``oldest_previous_id``. Raises UnavailableError.
        """
        ...

    async def oldest_previous_id(self) -> CheckpointId:
        """Return the ``previous_id`` of the oldest checkpoint that is still stored.

        A client whose watermark is lower cannot learn everything that it missed. Returns the id
        of the last checkpoint if none is stored. Raises UnavailableError.
        """
        ...

    def log_of(self, checkpoint_id: CheckpointId) -> LogId | None:
        """Return which ledger of the log has this checkpoint; None if this is not known. Raises
        PositionUnknownError if the log lacks what listeners were sent: another ledger that begins
        at the same place would pass for it."""
        ...
