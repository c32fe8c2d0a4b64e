"""Finds settings that are valid, but fight each other: one makes the other useless or harmful.

``conflicts`` is a pure function. Values that are wrong by themselves are refused when the settings
are loaded (``settings``).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from daemon.settings import Settings
from replication.settings import PlacementSettings

JUTE_MAXBUFFER_DEFAULT = 1_048_575
"""Bytes that ZooKeeper's servers accept in a request unless jute.maxbuffer is set."""
FULL_DISK_SHARE = 0.05
"""Free share of a disk at which bookies become read-only by default (diskUsageThreshold 0.95)."""
FLUSH_S = 10
"""Default flushInterval of bookies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """``keys``: the settings that fight each other. ``text``: what follows. ``advice``: what to
    do."""

    keys: tuple[str, ...]
    text: str
    advice: str


def conflicts(settings: Settings) -> list[Conflict]:
    """Return all conflicts between the settings of a node."""
    return [
        *_roles(settings),
        *_checks(settings),
        *_holds(settings),
        *_copies(settings),
        *_placement(settings.placement),
        *_zookeeper(settings),
    ]


def _roles(settings: Settings) -> Iterator[Conflict]:
    auditor, replication = settings.auditor, settings.replication
    if settings.node.mode == "observe":
        return
    if not (auditor.enabled or replication.enabled):
        yield Conflict(
            keys=("auditor.enabled", "replication.enabled"),
            text="both roles are disabled, so this node does nothing",
            advice='Enable one, or set node.mode = "observe".',
        )
    if auditor.standbys_keep_ledger_map and not auditor.enabled:
        yield Conflict(
            keys=("auditor.standbys_keep_ledger_map", "auditor.enabled"),
            text="this node never leads, so it keeps no ledger map",
            advice="Set auditor.standbys_keep_ledger_map = false.",
        )


def _checks(settings: Settings) -> Iterator[Conflict]:
    checks, placement = settings.checks, settings.placement
    if checks.all_ledgers_share and not checks.all_ledgers_interval_s:
        yield Conflict(
            keys=("checks.all_ledgers_share", "checks.all_ledgers_interval_s"),
            text="the check all-ledgers runs only on request, so its share is rarely used",
            advice="Set an interval.",
        )
    if checks.repairs_placement and not checks.placement_interval_s:
        yield Conflict(
            keys=("checks.repairs_placement", "checks.placement_interval_s"),
            text="the check placement never runs by itself, so no placement is repaired",
            advice="Set checks.placement_interval_s.",
        )
    if checks.repairs_placement and not _has_racks(placement):
        yield Conflict(
            keys=("checks.repairs_placement", "placement.racks_file"),
            text="no source of racks is set, so every placement counts as good",
            advice="Set placement.racks_file, racks_script or racks_znode.",
        )


def _holds(settings: Settings) -> Iterator[Conflict]:
    if settings.hold.enabled and settings.hold.share >= 1:
        yield Conflict(
            keys=("hold.enabled", "hold.share"),
            text="with a share of 1 no safety hold begins automatically",
            advice="Lower hold.share, or say what is meant: hold.enabled = false.",
        )


def _copies(settings: Settings) -> Iterator[Conflict]:
    replication = settings.replication
    if replication.free_disk_share_min < FULL_DISK_SHARE:
        yield Conflict(
            keys=("replication.free_disk_share_min",),
            text="copies may fill a bookie until it becomes read-only (5 % free space by default)",
            advice="Raise it above the share that diskUsageThreshold leaves free.",
        )
    if 0 < replication.copies_reread_after_s <= FLUSH_S:
        yield Conflict(
            keys=("replication.copies_reread_after_s",),
            text="new copies are read before the bookies have flushed, so a loss stays unnoticed",
            advice="Set it above flushInterval of the bookies (10 s; in Pulsar 60 s).",
        )
    if replication.target == "local" and settings.checks.repairs_placement:
        yield Conflict(
            keys=("replication.target", "checks.repairs_placement"),
            text="a copy goes to the local bookie only, so few placements can be repaired",
            advice='Set replication.target = "placement".',
        )
    if not replication.enabled and (replication.bytes_per_s or replication.entries_per_s):
        yield Conflict(
            keys=("replication.enabled", "replication.bytes_per_s"),
            text="this node copies nothing, so its limits have no effect",
            advice="Set the limits on nodes that repair, or use bookmender limits.",
        )


_OF_POLICY = {
    "rack": ("min_racks", "enforce_min_racks"),
    "region": ("regions", "min_regions", "enforce_min_regions"),
    "zone": ("min_zones", "desired_zones", "enforce_zones"),
}


def _placement(placement: PlacementSettings) -> Iterator[Conflict]:
    default = PlacementSettings()
    for policy, names in _OF_POLICY.items():
        changed = [name for name in names if getattr(placement, name) != getattr(default, name)]
        if changed and policy != placement.policy:
            yield Conflict(
                keys=("placement.policy", *(f"placement.{name}" for name in changed)),
                text=f"the policy is {placement.policy}, so settings of {policy} have no effect",
                advice=f'Set placement.policy = "{policy}", or remove them.',
            )
    if placement.policy == "random" and _has_racks(placement):
        yield Conflict(
            keys=("placement.policy", "placement.racks_file"),
            text="the policy random ignores the source of racks",
            advice="Choose the policy of the cluster's clients.",
        )
    if placement.disk_weight_max != default.disk_weight_max and not placement.weighted_by_free_disk:
        yield Conflict(
            keys=("placement.disk_weight_max", "placement.weighted_by_free_disk"),
            text="bookies are not weighted by free disk, so the maximum has no effect",
            advice="Set placement.weighted_by_free_disk = true, or remove it.",
        )


def _has_racks(placement: PlacementSettings) -> bool:
    return bool(placement.racks_file or placement.racks_script or placement.racks_znode)


def _zookeeper(settings: Settings) -> Iterator[Conflict]:
    zookeeper = settings.zookeeper
    servers = len(settings.uri.hosts.split(","))
    attempt_s = zookeeper.session_timeout_s / (servers + 1)
    if zookeeper.connect_timeout_s < attempt_s:
        yield Conflict(
            keys=("zookeeper.connect_timeout_s", "zookeeper.session_timeout_s"),
            text=f"one attempt to connect may take {attempt_s:.1f} s, longer than the timeout",
            advice="Raise zookeeper.connect_timeout_s.",
        )
    if zookeeper.request_bytes_max > JUTE_MAXBUFFER_DEFAULT:
        yield Conflict(
            keys=("zookeeper.request_bytes_max",),
            text="servers with the default jute.maxbuffer end the session at such a request",
            advice="Check that jute.maxbuffer of all servers is larger.",
        )
