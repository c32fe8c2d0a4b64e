"""The levels of a run, and the options that its executors need. All values can be pickled."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from ledgers.errors import SettingsError
from ledgers.metadata import BookieId
from ledgers.placement import Rule


class Level(enum.Enum):
    """How much a run reads. Each level finds everything that the level before it finds."""

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
        """0 to 3. A look at one level also counts as a look at every level of lower depth."""
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
    seed: int = 0
    """Seed of the sample. The same seed reads the same entries."""
    entry_lists: bool = False
    """True to ask bookies for lists of their entries first (see
    ``replication.planning.entry_lists``)."""
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
    default_password: str = ""
    default_digest_type: str = "CRC32"

    def __post_init__(self) -> None:
        if not 0 < self.sample_share <= 1:
            raise SettingsError.not_allowed("sample", self.sample_share, "above 0, up to 1")
        if not 1 <= self.reads_in_flight_per_bookie <= 500:
            raise SettingsError.not_allowed(
                "reads_in_flight_per_bookie", self.reads_in_flight_per_bookie, "1 to 500"
            )
        if not 1 <= self.ledgers_at_once <= 1_000:
            raise SettingsError.not_allowed("ledgers_at_once", self.ledgers_at_once, "1 to 1000")
