"""The options of a run: its level, what its executors need, and what only the driver needs. All
values can be pickled."""

import enum
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from pathlib import Path

from ledgers.bulk.limiters import READS_IN_FLIGHT_CEILING
from ledgers.errors import SettingsError
from ledgers.model import BookieId
from ledgers.placement import Rule
from ledgers.secret import Secret
from ledgers.security import OPEN, SecuritySettings


class Level(enum.Enum):
    """The level of a run: how much it reads. Each level finds everything that the level before it
    finds."""

    METADATA = "metadata"
    """Asks no bookie. Finds unreadable metadata, unregistered bookies and misplaced copies."""
    ENDS = "ends"
    """Reads the first and the last entry of each copy of each fragment."""
    SAMPLE = "sample"
    """Also reads a share of the entries between them, the same ones of each copy."""
    FULL = "full"
    """Reads every entry of every copy, and compares the copies with each other."""

    @property
    def depth(self) -> int:
        """0 to 3. An inspection at one level also counts for every level of lower depth."""
        return list(Level).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTimeouts:
    """Timeouts of ZooKeeper sessions, as in the settings."""

    session_s: float = 10.0
    connect_s: float = 15.0


DEFAULT_TIMEOUTS = SessionTimeouts()


@dataclass(frozen=True, slots=True, kw_only=True)
class FsckOptions:
    """The options of a run that every executor receives. They contain no secret except the
    password."""

    metadata_service_uri: str
    level: Level = Level.ENDS
    sample_share: float = 0.01
    """Share of the entries to read at level ``sample``; above 0, at most 1."""
    full_scan: frozenset[int] = frozenset()
    """Ledgers to read completely at level ``sample``."""
    seed: int = 0
    """Seed of the sample. The same seed reads the same entries."""
    reads_per_s: int = 0
    """Entries that all executors together may read per second. 0: no limit."""
    bytes_per_s: int = 0
    """Stored bytes that all executors together may read per second. 0: no limit."""
    reads_in_flight_per_bookie: int = 64
    """Maximum for one executor; lowered if there are many of them (rule S10)."""
    idle_open_after_s: float = 86_400.0
    """An open ledger is idle if its metadata is older than this and its last entry does not
    change."""
    rule: Rule | None = None
    """Rule of the placement policy. None: placement is not checked."""
    racks: Mapping[BookieId, str] = field(default_factory=dict)
    """Present or last known rack of each bookie; bookies without a known rack are left out."""
    ledgers_at_once: int = 64
    """Number of ledgers that one executor checks at the same time."""
    timeouts: SessionTimeouts = DEFAULT_TIMEOUTS
    security: SecuritySettings = OPEN
    """TLS and authentication. It names files, which must exist on every executor's host."""
    default_password: Secret[str] = Secret("")
    default_digest_type: str = "CRC32"

    def __post_init__(self) -> None:
        if not 0 < self.sample_share <= 1:
            raise SettingsError.not_allowed("sample", self.sample_share, "above 0, up to 1")
        if not 1 <= self.reads_in_flight_per_bookie <= READS_IN_FLIGHT_CEILING:
            raise SettingsError.not_allowed(
                "reads_in_flight_per_bookie", self.reads_in_flight_per_bookie, "1 to 500"
            )
        if not 1 <= self.ledgers_at_once <= 1_000:
            raise SettingsError.not_allowed("ledgers_at_once", self.ledgers_at_once, "1 to 1000")

    def share_of(self, ledger_id: int) -> float:
        """Return the share of the ledger's entries to read at level ``sample``."""
        return 1.0 if ledger_id in self.full_scan else self.sample_share


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedChanges:
    """The changes that a run of ``--changed`` checks, and acknowledges at its end.

    ``client``: the name of the client of the feed. ``generation``: of the feed. ``position``: the
    id of the last checkpoint before the run, and ``log`` the ledger of the log that has it (as in
    ``checkpoints.chain``; None: not known). ``is_whole``: the run checks all ledgers, because the
    changes since an earlier run are not known. Then the other fields are empty.

    ``ledger_ids``, ``versions``, ``are_deleted``: the changed ledgers, in parallel; each once, at
    the version that the feed told, and whether that version is the deletion.
    """

    client: str
    generation: int
    position: int
    is_whole: bool
    log: tuple[int, int, int] | None = None
    ledger_ids: "array[int]" = field(default_factory=lambda: array("q"))
    versions: "array[int]" = field(default_factory=lambda: array("Q"))
    are_deleted: bytes = b""

    def __post_init__(self) -> None:
        assert len(self.ledger_ids) == len(self.versions) == len(self.are_deleted), self.client
        assert not (self.is_whole and self.ledger_ids), self.client

    @property
    def deleted(self) -> list[int]:
        return list(compress(self.ledger_ids, self.are_deleted))

    @property
    def existing(self) -> list[int]:
        return list(compress(self.ledger_ids, map(not_, self.are_deleted)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FsckJob:
    """The options of a run that only the driver needs."""

    run: str
    """Name of the run: its time in UTC, such as ``20261121T193500Z``, so that names sort by time.
    It is part of paths."""
    output: Path
    """Folder of the results. It exists, and no other run writes to it meanwhile."""
    changes: FeedChanges | None = None
    """The run follows the change feed. None: it does not, and checks all ledgers."""
    time_budget_s: float = 0.0
    """Begin no further part after this time. The ledgers whose last check at this level or closer
    is the oldest come first. 0: no limit."""

    @property
    def is_changed_only(self) -> bool:
        """True if the run checks only what changed, and what was wrong or unknown before."""
        return self.changes is not None and not self.changes.is_whole

    @property
    def client(self) -> str:
        """The client of the change feed; empty if the run does not follow the feed."""
        return "" if self.changes is None else self.changes.client

    def __post_init__(self) -> None:
        if self.time_budget_s < 0:
            raise SettingsError.not_allowed("time_budget_s", self.time_budget_s, "0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class FsckProgress:
    """The progress of a run, over all its executors."""

    phase: str
    """For people: ``listing``, ``estimating``, ``checking``, ``rechecking`` or ``writing``."""
    ledgers_done: int = 0
    ledgers_expected: int = 0
    """0: not known yet."""
    work_done: int = 0
    work_expected: int = 0
    """The work that takes the time: copies to read, or ledgers if their work is much alike. 0: not
    known yet."""
    entries_read: int = 0
    bytes_read: int = 0


OnProgress = Callable[[FsckProgress], None]
"""Called in the driver, from any thread, at most a few times per second."""
