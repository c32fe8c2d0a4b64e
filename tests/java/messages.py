"""What is said to the Java program, and what it prints: one JSON line each.

Bytes are in hex, ``sha256`` is over all payloads of a ledger, one after the other. Digest types go
by the names of Java's API: CRC32, CRC32C, MAC, DUMMY.
"""

import enum
from collections.abc import Mapping
from typing import Literal

import msgspec

# --- Said ----------------------------------------------------------------------------------------


class Shape(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What ledgers that Java writes look like.

    With ``ack_quorum`` below ``write_quorum`` some copies may never arrive: a client that ends
    after the last acknowledgement drops what it still had to send. ``sizes``: payload bytes, taken
    in turn. The same seed gives the same payloads; of ``count`` ledgers each has its own.
    ``close``: else they stay open, as if their writer had died.
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
    """What a ledger shall contain: its last entry's id (-1: none), and its payloads."""

    ledger: int
    last: int
    sha256: str


# --- Printed -------------------------------------------------------------------------------------


class Verdict(enum.Enum):
    """Of a ledger, or of all that were judged."""

    WHOLE = "whole"
    """Every copy is there and good."""
    MISSING = "missing"
    """At least one copy is not there, or not good; or metadata names a bookie that is gone."""
    UNKNOWN = "unknown"
    """None was found missing, but not all could be read."""

    @property
    def exit_code(self) -> int:
        return {Verdict.WHOLE: 0, Verdict.MISSING: 1, Verdict.UNKNOWN: 3}[self]


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", rename="camel"):
    """Base of what is printed; ``kind`` tells one from the other."""


class Progress(Record, frozen=True, kw_only=True, tag="progress"):
    """Once a second while copies are read."""

    ledgers: int
    ledgers_to_do: int
    copies: int


class BadCopy(msgspec.Struct, frozen=True):
    entry: int
    bookie: str
    problem: str


class LedgerVerdict(Record, frozen=True, kw_only=True, tag="ledger"):
    """``problems``: how many copies are not good, by what is wrong with them; ``examples``: the
    first few.

    ``bytes``: payload bytes of its entries, each counted once. ``gone_bookies``: those that its
    metadata names and that are not registered. The other fields are None when it could not be
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
    """A ledger's content against what was expected. ``error``: what is different."""

    ledger: int
    verdict: Verdict
    error: str | None = None


class Summary(Record, frozen=True, kw_only=True, tag="summary"):
    """The last word. ``ledgers`` and ``contents`` (see Comparison): how many, by verdict."""

    verdict: Verdict
    ledgers: Mapping[Verdict, int]
    contents: Mapping[Verdict, int]
    entries: int
    copies: int
    good: int


class Written(Record, frozen=True, kw_only=True, tag="written"):
    """``last``: its last entry's id, -1 when it is empty."""

    ledger: int
    last: int
    sha256: str


class Content(Record, frozen=True, kw_only=True, tag="content"):
    """What a reader sees. ``length``: by the metadata or the last entry; ``bytes``: by counting."""

    ledger: int
    error: str | None = None
    state: str | None = None
    last: int | None = None
    length: int | None = None
    bytes: int | None = None
    sha256: str | None = None


class Followed(Record, frozen=True, kw_only=True, tag="followed"):
    """A reader has the ledger open."""

    ledger: int


class Metadata(Record, frozen=True, kw_only=True, tag="metadata"):
    """As Java parsed it. ``serialized``: as Java would write it."""

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
    serialized: str


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


class Created(Record, frozen=True, kw_only=True, tag="created"):
    """An endless writer has its ledger."""

    ledger: int


class Added(Record, frozen=True, kw_only=True, tag="added"):
    """An endless writer's entry was acknowledged."""

    ledger: int
    entry: int


class Pacing(Record, frozen=True, kw_only=True, tag="pacing"):
    """A paced writer has its ledger; entry ``n`` is due at ``start_ns + n * interval_ns``,
    monotonic."""

    ledger: int
    start_ns: int
    interval_ns: int


class Paced(Record, frozen=True, kw_only=True, tag="paced"):
    """How long after they were due a paced writer's next entries were acknowledged, from ``first``
    on."""

    first: int
    latencies_us: tuple[int, ...]


class Stopped(Record, frozen=True, kw_only=True, tag="stopped"):
    """An endless writer's end. ``last`` and ``sha256``: of what was acknowledged."""

    ledger: int
    last: int
    sha256: str
    error: str | None = None


class Failure(Record, frozen=True, kw_only=True, tag="error"):
    """The command as a whole went wrong."""

    error: str


class End(Record, frozen=True, kw_only=True, tag="end"):
    """The last line of each command, with what would be its exit code."""

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
    | Created
    | Added
    | Pacing
    | Paced
    | Stopped
    | Failure
    | End
)

decode = msgspec.json.Decoder(AnyRecord).decode
"""Of one line."""
