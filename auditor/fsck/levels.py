"""How closely a run looks, and all that an executor needs to know of the run: values that can be
pickled."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from ledgers.errors import SettingsError
from ledgers.metadata import BookieId
from ledgers.placement import Rule


class Level(enum.Enum):
    """Each sees what the one before sees, and more."""

    METADATA = "metadata"
    """No bookie is asked: unreadable metadata, bookies that are gone, placement."""
    ENDS = "ends"
    """The first and the last entry of each copy of each fragment."""
    SAMPLE = "sample"
    """Besides, a share of the entries between them: the same ones of each copy."""
    FULL = "full"
    """Every entry of every copy, and the copies are compared with each other."""

    @property
    def depth(self) -> int:
        """0 to 3: what a closer look has found stands for a less close one as well."""
        return list(Level).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTimeouts:
    """Of sessions of ZooKeeper's, as in the settings."""

    session_s: float = 10.0
    connect_s: float = 15.0


DEFAULT_TIMEOUTS = SessionTimeouts()


@dataclass(frozen=True, slots=True, kw_only=True)
class FsckOptions:
    """What a run was asked for. Everything here reaches every executor, so no secrets but the
    password."""

    metadata_service_uri: str
    level: Level = Level.ENDS
    sample_share: float = 0.01
    """Of the entries, at level ``sample``."""
    seed: int = 0
    """Of the sample; the same seed reads the same entries."""
    entry_lists: bool = False
    """Whether bookies are asked for lists of their entries first (see
    ``replication.entry_lists``)."""
    reads_per_s: int = 0
    """Entries that all executors together read in a second at most. 0: no limit."""
    bytes_per_s: int = 0
    """Likewise stored bytes."""
    reads_in_flight_per_bookie: int = 64
    """Of one executor, and the less the more of them there are (rule S10)."""
    idle_open_after_s: float = 86_400.0
    """An open ledger whose metadata is older, and whose last entry stands still, is idle."""
    rule: Rule | None = None
    """Of the placement policy. None: nothing is said of where copies are."""
    racks: Mapping[BookieId, str] = field(default_factory=dict)
    """Where bookies are, or were; of those that are missing here nobody knows it."""
    ledgers_at_once: int = 64
    """That one executor looks at."""
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
