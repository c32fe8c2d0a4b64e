"""The settings ``[replication]`` and ``[placement]``. ``daemon.settings`` parses them."""

import re
from dataclasses import dataclass
from pathlib import PurePath

from ledgers.bulk.limiters import READS_IN_FLIGHT_CEILING
from ledgers.digest import EntryDigest
from ledgers.errors import SettingsError
from ledgers.model import DigestType
from ledgers.secret import Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationSettings:
    """The section ``[replication]``."""

    enabled: bool = True
    """False: this node repairs no ledgers; its auditor may still run."""
    ledgers_at_once: int = 100
    """Maximum number of ledgers repaired at the same time. 1: one after the other, as Java does. A
    ledger that waits for a slow bookie does not count."""
    open_ledger_grace_s: float = 30.0
    """Open-ledger grace. An open ledger that lacks a bookie in its last fragment is left to its
    writer for this time, and then fenced. 0: fence at once, which may interrupt a writer that is
    just replacing the bookie."""
    retry_min_s: float = 10.0
    """First wait after a ledger could not be repaired; doubles up to ``retry_max_s``."""
    retry_max_s: float = 300.0
    """Longest wait between two tries of the same ledger."""
    idle_wait_s: float = 2.0
    """Interval at which an idle worker polls the queue. While no ledger is marked, it polls five
    times less often, because the first mark wakes it. All nodes together poll at most 20 times per
    second, so with more than 20 × ``idle_wait_s`` nodes each node polls less often."""
    target: str = "placement"
    """``placement``: bookies that the placement policy allows, the least loaded first, and this
    host's among equals. ``local``: only this host's bookie; ledgers that have it already are left
    to other nodes."""
    free_disk_share_min: float = 0.1
    """The share of a bookie's disk space that must be free for it to be a target. BookKeeper's
    bookies turn read-only at 5 % free (its diskUsageThreshold). 0: no floor."""
    copies_reread_after_s: float = 120.0
    """Delay after a repair before its copies are read again. Must exceed the bookies'
    ``flushInterval`` (10 s by default, 60 s in Pulsar's configuration). 0: never; then copies that
    DbLedgerStorage loses after it deleted the same ledger are not noticed."""
    checked_share: float = 0.0
    """The share of a copy's entries that a repair reads besides the first and the last. 1: all."""
    reads_in_flight_per_bookie: int = READS_IN_FLIGHT_CEILING
    """Maximum number of reads in flight of this process at one bookie (rule S10). A bookie 4.18.0
    stops for good beyond 10,000 from all clients together, so all nodes together keep to 2,000."""
    bytes_per_s: int = 0
    """Maximum stored bytes that this node copies per second. 0: no limit."""
    entries_per_s: int = 0
    """Maximum entries that this node copies per second. 0: no limit."""
    yields_to_writers: bool = True
    """True: full speed at bookies without active clients. At each other bookie, all nodes together
    add at most 5,000 entries per second (each ledger counts as 30 more). They read 5,000 by batch
    reads or 2,500 by single reads, and move 65 MB. They do less while the bookie replies late.
    False: full speed at all bookies."""
    default_password: Secret[str] = Secret("")
    """Password of ledgers whose metadata contains none (version 1, BookKeeper before 4.2)."""
    default_digest_type: str = "CRC32"
    """Digest type of ledgers whose metadata contains none: CRC32, HMAC, CRC32C or DUMMY."""

    def __post_init__(self) -> None:
        _require("ledgers_at_once", self.ledgers_at_once, 1, 10_000)
        _require("open_ledger_grace_s", self.open_ledger_grace_s, 0, 86_400)
        _require("retry_min_s", self.retry_min_s, 0.1, 86_400)
        _require("retry_max_s", self.retry_max_s, self.retry_min_s, 86_400)
        _require("idle_wait_s", self.idle_wait_s, 0.05, 3_600)
        _require("free_disk_share_min", self.free_disk_share_min, 0, 0.9)
        _require("copies_reread_after_s", self.copies_reread_after_s, 0, 86_400)
        _require("checked_share", self.checked_share, 0, 1)
        reads = self.reads_in_flight_per_bookie
        _require("reads_in_flight_per_bookie", reads, 1, READS_IN_FLIGHT_CEILING)
        _require("bytes_per_s", self.bytes_per_s, 0, 10**12)
        _require("entries_per_s", self.entries_per_s, 0, 10**9)
        if self.target not in ("placement", "local"):
            raise SettingsError.not_allowed("replication.target", self.target, "placement, local")
        types, key = DigestType.__members__, "replication.default_digest_type"
        if self.default_digest_type not in types:
            raise SettingsError.not_allowed(key, self.default_digest_type, ", ".join(types))

    @property
    def fallback_digest(self) -> EntryDigest:
        """The digest of ledgers whose metadata does not contain it (``ledger_digest``)."""
        password = self.default_password.reveal().encode()
        return EntryDigest(DigestType[self.default_digest_type], password)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSettings:
    """The section ``[placement]``: where copies go. Use the same policy as the cluster's
    clients."""

    policy: str = "rack"
    """BookKeeper's placement policy: ``random``, ``rack``, ``region`` or ``zone``."""
    racks_file: str = ""
    """The absolute path of a text file of racks: on each line ``bookie = /rack``. Set at most one
    of the three sources of racks. Without any, all bookies are in the same rack."""
    racks_script: str = ""
    """A command that receives hosts and prints a rack for each, as networkTopologyScriptFileName.
    """
    racks_znode: str = ""
    """The path of Pulsar's znode of racks, usually ``/bookies``."""
    min_racks: int = 2
    """``rack``: minimum number of racks of each entry (minNumRacksPerWriteQuorum)."""
    enforce_min_racks: bool = False
    """True: a ledger stays under-replicated rather than break the rule of ``min_racks``."""
    regions: str = ""
    """``region``: the regions that may store copies, as ``R1;R2`` (reppRegionsToWrite). Empty: all.
    """
    min_regions: int = 2
    """Minimum number of regions of each acknowledged entry (reppMinimumRegionsForDurability)."""
    enforce_min_regions: bool = True
    """True: a ledger stays under-replicated rather than break the rule of ``min_regions``, or leave
    ``regions``."""
    min_zones: int = 2
    """``zone``: minimum number of zones of each entry (minNumZonesPerWriteQuorum)."""
    desired_zones: int = 3
    """Number of zones if possible (desiredNumZonesPerWriteQuorum)."""
    enforce_zones: bool = True
    """True: a ledger stays under-replicated rather than break the rule of ``min_zones``."""
    may_leave_isolation: bool = False
    """True: copies of a ledger that Pulsar isolates may leave its groups if no bookie of them is
    left."""
    weighted_by_free_disk: bool = False
    """True: bookies with more free disk space are chosen more often
    (diskWeightBasedPlacementEnabled)."""
    disk_weight_max: float = 3.0
    """With ``weighted_by_free_disk``: how many times as often as the median bookie a bookie is
    chosen at most. 0: no limit."""

    def __post_init__(self) -> None:
        _require("min_racks", self.min_racks, 1, 100, section="placement")
        _require("min_regions", self.min_regions, 1, 100, section="placement")
        _require("min_zones", self.min_zones, 1, 100, section="placement")
        _require("desired_zones", self.desired_zones, self.min_zones, 100, section="placement")
        _require("disk_weight_max", self.disk_weight_max, 0, 1_000, section="placement")
        policies = ("random", "rack", "region", "zone")
        if self.policy not in policies:
            raise SettingsError.not_allowed("placement.policy", self.policy, ", ".join(policies))
        if self.racks_znode and not re.fullmatch("(/[^/]+)+", self.racks_znode):
            allowed = "the path of a znode, as /bookies"
            raise SettingsError.not_allowed("placement.racks_znode", self.racks_znode, allowed)
        if self.racks_file and not PurePath(self.racks_file).is_absolute():
            # Commands are run from other directories than the daemon.
            allowed = "an absolute path, as in /etc/bookmender/racks"
            raise SettingsError.not_allowed("placement.racks_file", self.racks_file, allowed)
        given = [key for key in ("racks_file", "racks_script", "racks_znode") if getattr(self, key)]
        if len(given) > 1:
            raise SettingsError(
                f"placement.{given[0]} and placement.{given[1]} are both set; set one of them",
                setting=f"placement.{given[1]}",
            )
        is_bound = self.policy == "rack" and self.enforce_min_racks
        if not given and (is_bound or self.policy in ("region", "zone")):
            key = "enforce_min_racks" if is_bound else "policy"
            raise SettingsError(
                f"placement.{key} is {getattr(self, key)!r}, which needs the racks of the bookies. "
                "Set placement.racks_file, placement.racks_script or placement.racks_znode",
                setting=f"placement.{key}",
            )


def _require(
    key: str, value: float, least: float, most: float, *, section: str = "replication"
) -> None:
    if not least <= value <= most:
        raise SettingsError.not_allowed(f"{section}.{key}", value, f"{least:g} to {most:g}")
