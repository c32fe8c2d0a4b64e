"""Messages to the Java program, and its output: one JSON line each.

Bytes are in hex. ``sha256`` is over all payloads of a ledger, one after the other. Digest types
have the names of Java's API: CRC32, CRC32C, MAC, DUMMY.
"""

import enum
from collections.abc import Mapping
from typing import Literal

import msgspec

# --- Input ----------------------------------------------------------------------------------------


class Shape(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The shape of ledgers that Java writes.

    With ``ack_quorum`` below ``write_quorum``, some copies may never arrive: a client that ends
    after the last acknowledgement drops requests that it has not sent. ``sizes``: payload bytes,
    used in turn. The same seed gives the same payloads; each of ``count`` ledgers has its own.
    ``close``: if False, the ledger stays open, as if its writer had died.
    """

    ensemble_size: int = 3
    write_quorum: int = 3
    ack_quorum: int = 3
    digest: str = "CRC32C"
    password: str = "secret"
    custom: Mapping[str, str] = msgspec.field(default_factory=dict)
    entries: int = 10
    sizes: tuple[int, ...] = (100,)
    seed: int = 1
    count: int = 1
    close: bool = True


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """The expected content of a ledger: its last entry's id (-1: none), and its payloads."""

    ledger: int
    last: int
    sha256: str


# --- Output ---------------------------------------------------------------------------------------


class Verdict(enum.Enum):
    """The verdict on a ledger, or on all that were judged."""

    WHOLE = "whole"
    """Every copy exists and is good."""
    MISSING = "missing"
    """At least one copy is missing or bad, or the metadata names an absent bookie."""
    UNKNOWN = "unknown"
    """No copy is known to be missing, but some could not be read."""

    @property
    def exit_code(self) -> int:
        return {Verdict.WHOLE: 0, Verdict.MISSING: 1, Verdict.UNKNOWN: 3}[self]


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", rename="camel"):
    """Base of the printed records. ``kind`` distinguishes them."""


class Progress(Record, frozen=True, kw_only=True, tag="progress"):
    """Printed once a second while copies are read."""

    ledgers: int
    ledgers_to_do: int
    copies: int


class BadCopy(msgspec.Struct, frozen=True):
    entry: int
    bookie: str
    problem: str


class LedgerVerdict(Record, frozen=True, kw_only=True, tag="ledger"):
    """``problems``: the number of bad copies by problem; ``examples``: the first few.

    ``bytes``: payload bytes of its entries, each counted once. ``gone_bookies``: bookies that the
    metadata names and that are not registered. The other fields are None if the ledger could not be
    opened.
    """

    ledger: int
    verdict: Verdict
    error: str | None = None
    state: str | None = None
    entries: int | None = None
    bytes: int | None = None
    copies: int | None = None
    good: int | None = None
    gone_bookies: tuple[str, ...]
    problems: Mapping[str, int]
    examples: tuple[BadCopy, ...]


class Comparison(Record, frozen=True, kw_only=True, tag="comparison"):
    """A ledger's content compared with the expected content. ``error``: the difference."""

    ledger: int
    verdict: Verdict
    error: str | None = None


class Summary(Record, frozen=True, kw_only=True, tag="summary"):
    """The last record. ``ledgers`` and ``contents`` (see Comparison): counts by verdict."""

    verdict: Verdict
    ledgers: Mapping[Verdict, int]
    contents: Mapping[Verdict, int]
    entries: int
    copies: int
    good: int


class Written(Record, frozen=True, kw_only=True, tag="written"):
    """``last``: the last entry's id, -1 if the ledger is empty."""

    ledger: int
    last: int
    sha256: str


class Content(Record, frozen=True, kw_only=True, tag="content"):
    """The content for a reader.

    ``length``: by the metadata or the last entry; ``bytes``: counted.
    """

    ledger: int
    error: str | None = None
    state: str | None = None
    last: int | None = None
    length: int | None = None
    bytes: int | None = None
    sha256: str | None = None


class Followed(Record, frozen=True, kw_only=True, tag="followed"):
    """A reader has opened the ledger."""

    ledger: int


class Metadata(Record, frozen=True, kw_only=True, tag="metadata"):
    """The metadata as Java parsed it. ``serialized``: as Java would write it, if it was asked."""

    ledger: int
    metadata_version: int
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    state: str
    length: int
    last: int
    digest: str | None = None
    password: str | None = None
    ctime: int
    custom: Mapping[str, str]
    ensembles: Mapping[int, tuple[str, ...]]
    serialized: str = ""


class Mark(Record, frozen=True, kw_only=True, tag="mark"):
    """An under-replicated ledger. ``ctime``: ms since 1970, -1 when not stored."""

    ledger: int
    replicas: tuple[str, ...]
    ctime: int
    locked_by: str | None = None


class QueueState(Record, frozen=True, kw_only=True, tag="queue"):
    enabled: bool


class Auditor(Record, frozen=True, kw_only=True, tag="auditor"):
    auditor: str | None = None


class Listed(Record, frozen=True, kw_only=True, tag="listed"):
    """The ids of all ledgers, as Java lists them."""

    ledgers: tuple[int, ...]


class Created(Record, frozen=True, kw_only=True, tag="created"):
    """A ledger was created: that of an endless writer, or one of a changer."""

    ledger: int


class Closed(Record, frozen=True, kw_only=True, tag="closed"):
    ledger: int


class Deleted(Record, frozen=True, kw_only=True, tag="deleted"):
    ledger: int


class StepFailed(Record, frozen=True, kw_only=True, tag="failed"):
    """A step of a changer failed, for example because a repair had fenced the ledger.

    ``ledger``: None if it could not be created.
    """

    step: str
    ledger: int | None = None
    error: str


class Added(Record, frozen=True, kw_only=True, tag="added"):
    """The entry of an endless writer was acknowledged."""

    ledger: int
    entry: int


class Pacing(Record, frozen=True, kw_only=True, tag="pacing"):
    """A paced writer has its ledger.

    Entry ``n`` is due at ``start_ns + n * interval_ns``, monotonic.
    """

    ledger: int
    start_ns: int
    interval_ns: int


class Paced(Record, frozen=True, kw_only=True, tag="paced"):
    """Delays from the due times of a paced writer's next entries to their acknowledgements.

    ``first``: the first of these entries.
    """

    first: int
    latencies_us: tuple[int, ...]


class Stopped(Record, frozen=True, kw_only=True, tag="stopped"):
    """The end of an endless writer. ``last`` and ``sha256``: of the acknowledged entries."""

    ledger: int
    last: int
    sha256: str
    error: str | None = None


class Failure(Record, frozen=True, kw_only=True, tag="error"):
    """The command as a whole failed."""

    error: str


class End(Record, frozen=True, kw_only=True, tag="end"):
    """The last line of each command, with its exit code."""

    exit: Literal[0, 1, 2, 3]


AnyRecord = (
    Progress
    | LedgerVerdict
    | Comparison
    | Summary
    | Written
    | Content
    | Followed
    | Metadata
    | Mark
    | QueueState
    | Auditor
    | Listed
    | Created
    | Closed
    | Deleted
    | StepFailed
    | Added
    | Pacing
    | Paced
    | Stopped
    | Failure
    | End
)

decode = msgspec.json.Decoder(AnyRecord).decode
"""Decodes one line."""
