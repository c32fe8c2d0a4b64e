"""What an operator may set of the auditor. Parsed and checked in ``daemon.settings``."""

from dataclasses import dataclass

from ledgers.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditorSettings:
    """The section ``[auditor]``."""

    enabled: bool = True
    """False: this node never stands for election; its worker half may still run."""
    lost_bookie_recovery_delay_s: int = 0
    """How long a bookie may be away before its ledgers are marked. Only the value for a cluster
    that has none yet: afterwards the znode ``lostBookieRecoveryDelay`` decides, as with Java."""
    bookie_check_interval_s: float = 86_400.0
    """How often all metadata is compared with the list of bookies, whatever was seen to happen."""

    def __post_init__(self) -> None:
        delay_s = self.lost_bookie_recovery_delay_s
        if not 0 <= delay_s <= 604_800:
            raise SettingsError.not_allowed(
                "auditor.lost_bookie_recovery_delay_s", delay_s, "0 to 604800"
            )
        interval_s = self.bookie_check_interval_s
        if not 1 <= interval_s <= 31_622_400:
            raise SettingsError.not_allowed(
                "auditor.bookie_check_interval_s", interval_s, "1 to 31622400"
            )
