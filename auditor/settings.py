"""The settings of the auditor. ``daemon.settings`` parses them."""

import math
from dataclasses import dataclass

from ledgers.errors import SettingsError

YEAR_S = 31_622_400


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditorSettings:
    """The section ``[auditor]``."""

    enabled: bool = True
    """False: this node does not take part in the election. Its worker may still run."""
    lost_bookie_recovery_delay_s: int = 0
    """Recovery delay: time that a bookie may be absent before its ledgers are marked. Used only if
    the cluster has no znode ``lostBookieRecoveryDelay`` yet; afterwards the znode decides, as with
    Java."""
    bookie_check_interval_s: float = 86_400.0
    """Interval of audits of all ledgers, whether or not a change was noticed."""
    standbys_keep_ledger_map: bool = False
    """True: this node keeps the ledger map also while another node leads, so that it can take over
    at once. That costs about 100 bytes of memory per ledger and the reads of one scan."""

    def __post_init__(self) -> None:
        delay_s = self.lost_bookie_recovery_delay_s
        _require("lost_bookie_recovery_delay_s", delay_s, 0, 604_800)
        _require("bookie_check_interval_s", self.bookie_check_interval_s, 1, YEAR_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldSettings:
    """The section ``[hold]``: when a safety hold begins. A mass failure is probably a failure of
    the network or of ZooKeeper, not of the bookies."""

    enabled: bool = True
    """False: no hold begins by itself. Holds that operators order are still obeyed."""
    share: float = 0.3
    """A hold begins if more than this share of all bookies disappears within ``window_s``, and also
    ``bookies_min``. 0: any share. 1: no hold begins by itself."""
    bookies_min: int = 3
    """A hold begins only if at least this many bookies disappear, or a whole rack of at least two.
    """
    window_s: float = 120.0
    """Bookies that disappear within this time count together."""
    lasts_s: float = 3_600.0
    """After this time a hold ends by itself, and its bookies count as lost. 0: only an operator
    ends it."""

    def __post_init__(self) -> None:
        _require("share", self.share, 0, 1, section="hold")
        _require("bookies_min", self.bookies_min, 1, 10_000, section="hold")
        _require("window_s", self.window_s, 1, 86_400, section="hold")
        _require("lasts_s", self.lasts_s, 0, YEAR_S, section="hold")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksSettings:
    """The section ``[checks]``: the periodic checks. An interval of 0 disables a check."""

    all_ledgers_interval_s: float = 604_800.0
    """Interval of the check that reads entries of every copy of every ledger
    (auditorPeriodicCheckInterval)."""
    all_ledgers_share: float = 0.0
    """The share of a copy's entries that this check reads besides the first and the last. 1: all.
    (A hundredth of auditorLedgerVerificationPercentage.)"""
    replicas_interval_s: float = 0.0
    """Interval of the check that counts the copies of every entry of every closed ledger
    (auditorReplicasCheckInterval), in seconds. It reads all entries. 0: never."""
    placement_interval_s: float = 86_400.0
    """Interval of the check that compares where copies are with the placement policy. It reads no
    entries (auditorPeriodicPlacementPolicyCheckInterval)."""
    repairs_placement: bool = False
    """True: the leader marks closed ledgers whose placement breaks a rule, and workers move their
    copies. Set it to the same value on all nodes (repairedPlacementPolicyNotAdheringBookieEnabled).
    """
    idle_open_after_s: float = 86_400.0
    """An open ledger that got no entry for this long is reported as idle. 0: none is."""
    reads_per_s: int = 1_000
    """Entries that all checks together read per second. 0: no limit."""
    bytes_per_s: int = 50_000_000
    """Stored bytes that all checks together read per second. 0: no limit."""

    def __post_init__(self) -> None:
        for key in (
            "all_ledgers_interval_s",
            "replicas_interval_s",
            "placement_interval_s",
            "idle_open_after_s",
        ):
            _require(key, getattr(self, key), 0, YEAR_S, section="checks")
        _require("all_ledgers_share", self.all_ledgers_share, 0, 1, section="checks")
        _require("reads_per_s", self.reads_per_s, 0, 10**9, section="checks")
        _require("bytes_per_s", self.bytes_per_s, 0, 10**12, section="checks")

    @property
    def counts_as_idle_after_s(self) -> float:
        """``idle_open_after_s``; infinite if that is 0."""
        return self.idle_open_after_s or math.inf


def _require(
    key: str, value: float, least: float, most: float, *, section: str = "auditor"
) -> None:
    if not least <= value <= most:
        raise SettingsError.not_allowed(f"{section}.{key}", value, f"{least:.12g} to {most:.12g}")
