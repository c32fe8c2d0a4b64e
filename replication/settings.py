"""What an operator may set of replication. Parsed and checked in ``daemon.settings``."""

from dataclasses import dataclass

from ledgers.errors import SettingsError
from ledgers.metadata import DigestType


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationSettings:
    """The section ``[replication]``."""

    enabled: bool = True
    """False: this node takes no ledgers; its auditor half may still run."""
    ledgers_at_once: int = 100
    """Ledgers repaired at the same time. 1: one after the other, as Java does."""
    open_ledger_grace_s: float = 30.0
    """How long a ledger whose open last fragment misses a bookie is left to its writer before it
    is fenced. 0: fenced at once, which may cut off a writer that is replacing the bookie itself."""
    retry_min_s: float = 10.0
    """First wait after a ledger could not be repaired; doubles up to ``retry_max_s``."""
    retry_max_s: float = 300.0
    idle_wait_s: float = 2.0
    """How often the queue is looked at while it is empty and nothing else wakes the worker."""
    target: str = "any"
    """``any``: the least loaded bookie, among equals this host's. ``local``: this host's only."""
    default_password: str = ""
    """For ledgers whose metadata holds none (version 1, BookKeeper before 4.2)."""
    default_digest_type: str = "CRC32"
    """Likewise: CRC32, HMAC, CRC32C or DUMMY."""

    def __post_init__(self) -> None:
        _require("ledgers_at_once", self.ledgers_at_once, 1, 10_000)
        _require("open_ledger_grace_s", self.open_ledger_grace_s, 0, 86_400)
        _require("retry_min_s", self.retry_min_s, 0.1, 86_400)
        _require("retry_max_s", self.retry_max_s, self.retry_min_s, 86_400)
        _require("idle_wait_s", self.idle_wait_s, 0.05, 3_600)
        if self.target not in ("any", "local"):
            raise SettingsError.not_allowed("replication.target", self.target, "any, local")
        if self.default_digest_type not in DigestType.__members__:
            raise SettingsError.not_allowed(
                "replication.default_digest_type",
                self.default_digest_type,
                ", ".join(DigestType.__members__),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """The section ``[limits]``: what repairing may cost the cluster."""

    reads_in_flight_per_bookie: int = 64
    """Reads that this process has under way at one bookie at most (rule S10). A bookie of 4.18.0
    stops for good past 10,000 from all clients together: all our nodes keep to 2,000."""

    def __post_init__(self) -> None:
        _require("reads_in_flight_per_bookie", self.reads_in_flight_per_bookie, 1, 500, "limits")


def _require(
    key: str, value: float, least: float, most: float, section: str = "replication"
) -> None:
    if not least <= value <= most:
        raise SettingsError.not_allowed(f"{section}.{key}", value, f"{least:g} to {most:g}")
