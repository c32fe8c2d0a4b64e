"""Finds settings that are valid, but fight each other: one makes the other useless or harmful.

``conflicts`` is a pure function. ``exposed_secrets`` asks who may read the files with secrets.
Values that are wrong by themselves are refused when the settings are loaded (``settings``).
"""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from daemon.settings import (
    Settings,
    load_settings_and_sources,
    secret_keys,
    setting_value,
    variable_of,
)
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


Rule = tuple[str, Callable[[Settings], bool], str, str]
"""Keys, whether the settings fight each other, what follows, and what to do."""

RULES: tuple[Rule, ...] = (
    (
        "auditor.enabled replication.enabled",
        lambda s: not (_observes(s) or s.auditor.enabled or s.replication.enabled),
        "both roles are disabled, so this node does nothing",
        'Enable one, or set node.mode = "observe".',
    ),
    (
        "auditor.standbys_keep_ledger_map auditor.enabled",
        lambda s: s.auditor.standbys_keep_ledger_map and not (_observes(s) or s.auditor.enabled),
        "this node never leads, so it keeps no ledger map",
        "Set auditor.standbys_keep_ledger_map = false.",
    ),
    (
        "checks.all_ledgers_share checks.all_ledgers_interval_s",
        lambda s: s.checks.all_ledgers_share > 0 and not s.checks.all_ledgers_interval_s,
        "the check all-ledgers runs only on request, so its share is rarely used",
        "Set an interval.",
    ),
    (
        "checks.repairs_placement checks.placement_interval_s",
        lambda s: s.checks.repairs_placement and not s.checks.placement_interval_s,
        "the check placement never runs by itself, so no placement is repaired",
        "Set checks.placement_interval_s.",
    ),
    (
        "checks.repairs_placement placement.racks_file",
        lambda s: s.checks.repairs_placement and not _has_racks(s),
        "no source of racks is set, so every placement counts as good",
        "Set placement.racks_file, racks_script or racks_znode.",
    ),
    (
        "hold.enabled hold.share",
        lambda s: s.hold.enabled and s.hold.share >= 1,
        "with a share of 1 no safety hold begins automatically",
        "Lower hold.share, or say what is meant: hold.enabled = false.",
    ),
    (
        "replication.free_disk_share_min",
        lambda s: s.replication.free_disk_share_min < FULL_DISK_SHARE,
        "copies may fill a bookie until it becomes read-only (5 % free space by default)",
        "Raise it above the share that diskUsageThreshold leaves free.",
    ),
    (
        "replication.copies_reread_after_s",
        lambda s: 0 < s.replication.copies_reread_after_s <= FLUSH_S,
        "new copies are read before the bookies have flushed, so a loss stays unnoticed",
        "Set it above flushInterval of the bookies (10 s; in Pulsar 60 s).",
    ),
    (
        "replication.target checks.repairs_placement",
        lambda s: s.replication.target == "local" and s.checks.repairs_placement,
        "a copy goes to the local bookie only, so few placements can be repaired",
        'Set replication.target = "placement".',
    ),
    (
        "replication.enabled replication.bytes_per_s",
        lambda s: (
            not s.replication.enabled
            and bool(s.replication.bytes_per_s or s.replication.entries_per_s)
        ),
        "this node copies nothing, so its limits have no effect",
        "Set the limits on nodes that repair, or use bookmender limits.",
    ),
    (
        "placement.policy placement.racks_file",
        lambda s: s.placement.policy == "random" and _has_racks(s),
        "the policy random ignores the source of racks",
        "Choose the policy of the cluster's clients.",
    ),
    (
        "placement.disk_weight_max placement.weighted_by_free_disk",
        lambda s: (
            s.placement.disk_weight_max != PlacementSettings().disk_weight_max
            and not s.placement.weighted_by_free_disk
        ),
        "bookies are not weighted by free disk, so the maximum has no effect",
        "Set placement.weighted_by_free_disk = true, or remove it.",
    ),
    (
        "zookeeper.connect_timeout_s zookeeper.session_timeout_s",
        lambda s: (
            s.zookeeper.connect_timeout_s
            < s.zookeeper.session_timeout_s / (len(s.uri.hosts.split(",")) + 1)
        ),
        "one attempt to connect may take longer than the timeout: the session timeout divided by "
        "the number of servers plus one",
        "Raise zookeeper.connect_timeout_s.",
    ),
    (
        "zookeeper.request_bytes_max",
        lambda s: s.zookeeper.request_bytes_max > JUTE_MAXBUFFER_DEFAULT,
        "servers with the default jute.maxbuffer end the session at such a request",
        "Check that jute.maxbuffer of all servers is larger.",
    ),
)
OF_POLICY = {
    "rack": ("min_racks", "enforce_min_racks"),
    "region": ("regions", "min_regions", "enforce_min_regions"),
    "zone": ("min_zones", "desired_zones", "enforce_zones"),
}


def conflicts(settings: Settings) -> list[Conflict]:
    """Return all conflicts between the settings of a node."""
    found = [
        Conflict(keys=tuple(keys.split()), text=text, advice=advice)
        for keys, fight, text, advice in RULES
        if fight(settings)
    ]
    given, default = settings.placement, PlacementSettings()
    for policy, names in OF_POLICY.items():
        changed = [name for name in names if getattr(given, name) != getattr(default, name)]
        if changed and policy != given.policy:
            found.append(
                Conflict(
                    keys=("placement.policy", *(f"placement.{name}" for name in changed)),
                    text=f"the policy is {given.policy}, so settings of {policy} have no effect",
                    advice=f'Set placement.policy = "{policy}", or remove them.',
                )
            )
    return found


def _observes(settings: Settings) -> bool:
    return settings.node.mode == "observe"


def _has_racks(settings: Settings) -> bool:
    placement = settings.placement
    return bool(placement.racks_file or placement.racks_script or placement.racks_znode)


# --- Secrets --------------------------------------------------------------------------------------

SECRET_FILES = (
    "security.key_file",
    "security.key_password_file",
    "security.zookeeper_password_file",
    "security.bookie_password_file",
    "http.token_file",
    "http.key_file",
)
"""Settings that name a file with a secret."""


def exposed_secrets(settings: Settings, config: Path | None) -> Iterator[Conflict]:
    """Yield a conflict for each file with a secret that every user may read or change.

    ``config``: the settings file, which may hold secrets itself. A missing file is no conflict.
    """
    files: list[tuple[tuple[str, ...], str]] = [
        ((key,), setting_value(settings, key)) for key in SECRET_FILES
    ]
    if not settings.security.key_file:  # then the key is in the file of the certificate
        files.append((("security.certificate_file",), settings.security.certificate_file))
    if not settings.http.key_file:
        files.append((("http.certificate_file",), settings.http.certificate_file))
    if config is not None and (keys := _secrets_in(config)):
        files.append((keys, str(config)))
    for keys, file in files:
        with suppress(OSError):
            if file and os.stat(file).st_mode & (stat.S_IROTH | stat.S_IWOTH):
                yield Conflict(
                    keys=keys,
                    text=f"{file} holds a secret, and every user may read or change the file",
                    advice=f"Run chmod o-rw {file}.",
                )


def _secrets_in(config: Path) -> tuple[str, ...]:
    """Return the secrets that the settings file holds, also if the environment overrides them."""
    secrets = secret_keys()
    others = {n: v for n, v in os.environ.items() if n not in map(variable_of, secrets)}
    settings, sources = load_settings_and_sources(config, others)
    return tuple(
        key
        for key, source in sources.items()
        if key in secrets and source == str(config) and setting_value(settings, key)
    )
