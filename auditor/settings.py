"""What an operator may set of the auditor. Parsed and checked in ``daemon.settings``."""

import math
from dataclasses import dataclass

from ledgers.errors import SettingsError

YEAR_S = 31_622_400


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditorSettings:
    """The section ``[auditor]``."""

    enabled: bool = True
    """False: this node never stands for election; its worker half may still run."""
    lost_bookie_recovery_delay_s: int = 0
    """How long a bookie may be away before its ledgers are marked. Only the value for a cluster
    that has none yet: afterwards the znode ``lostBookieRecoveryDelay`` decides, as with Java."""
    bookie_check_interval_s: float = 86_400.0
    """How often the list of bookies is compared with all ledgers, whatever was seen to happen."""
    rescan_interval_s: float = 3_600.0
    """How often all metadata is read again where ZooKeeper (before 3.6) does not tell what
    changed."""
    standbys_keep_ledger_map: bool = False
    """Whether this node knows all ledgers also while another one leads: it takes over at once, for
    about 100 bytes of memory a ledger and the reads of one scan."""

    def __post_init__(self) -> None:
        delay_s = self.lost_bookie_recovery_delay_s
        _require("lost_bookie_recovery_delay_s", delay_s, 0, 604_800)
        _require("bookie_check_interval_s", self.bookie_check_interval_s, 1, YEAR_S)
        _require("rescan_interval_s", self.rescan_interval_s, 1, YEAR_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldSettings:
    """The section ``[hold]``: when so many bookies go at once that it is hardly they who failed."""

    enabled: bool = True
    """False: no hold begins by itself; one that an operator orders still stands."""
    share: float = 0.3
    """A hold begins when more than this share of the bookies is gone at once (0: whatever their
    share; 1: never), and"""
    bookies_min: int = 3
    """at least so many of them, or a whole rack of at least two."""
    window_s: float = 120.0
    """At once: they went within so long of each other."""
    lasts_s: float = 3_600.0
    """After so long it ends by itself, and they are lost. 0: only when an operator ends it."""

    def __post_init__(self) -> None:
        _require("share", self.share, 0, 1, section="hold")
        _require("bookies_min", self.bookies_min, 1, 10_000, section="hold")
        _require("window_s", self.window_s, 1, 86_400, section="hold")
        _require("lasts_s", self.lasts_s, 0, YEAR_S, section="hold")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksSettings:
    """The section ``[checks]``: what the leader looks at from time to time. An interval of 0:
    never."""

    all_ledgers_interval_s: float = 604_800.0
    """Reads entries of every copy of every ledger (auditorPeriodicCheckInterval)."""
    all_ledgers_share: float = 0.0
    """The share of a copy's entries that it reads besides the first and the last
    (auditorLedgerVerificationPercentage, of which it is the hundredth). 1: all."""
    replicas_interval_s: float = 0.0
    """Interval of the check that counts the copies of every entry of every closed ledger
    (auditorReplicasCheckInterval), in seconds. It reads all entries, unless ``entry_lists`` is on.
    0: never."""
    placement_interval_s: float = 86_400.0
    """Compares where copies are with the placement policy; reads no entry
    (auditorPeriodicPlacementPolicyCheckInterval)."""
    repairs_placement: bool = False
    """Whether closed ledgers whose placement breaks a rule are marked, by the leader, and moved, by
    workers: to be the same on all nodes (repairedPlacementPolicyNotAdheringBookieEnabled)."""
    idle_open_after_s: float = 86_400.0
    """An open ledger that got no entry for so long is reported as idle. 0: none is."""
    overdue_after_s: float = 0.0
    """A ledger that is marked for longer is reported as overdue
    (underreplicatedLedgerRecoveryGracePeriod). 0: none is."""
    reads_per_s: int = 1_000
    """Entries that all checks together read in a second at most. 0: no limit."""
    bytes_per_s: int = 50_000_000
    """Likewise stored bytes."""

    def __post_init__(self) -> None:
        for key in (
            "all_ledgers_interval_s",
            "replicas_interval_s",
            "placement_interval_s",
            "idle_open_after_s",
            "overdue_after_s",
        ):
            _require(key, getattr(self, key), 0, YEAR_S, section="checks")
        _require("all_ledgers_share", self.all_ledgers_share, 0, 1, section="checks")
        _require("reads_per_s", self.reads_per_s, 0, 10**9, section="checks")
        _require("bytes_per_s", self.bytes_per_s, 0, 10**12, section="checks")

    @property
    def counts_as_idle_after_s(self) -> float:
        """``idle_open_after_s``, where 0 is never."""
        return self.idle_open_after_s or math.inf


def _require(
    key: str, value: float, least: float, most: float, *, section: str = "auditor"
) -> None:
    if not least <= value <= most:
        raise SettingsError.not_allowed(f"{section}.{key}", value, f"{least:.12g} to {most:.12g}")
