"""Settings that change while the node runs: SIGHUP reads the file again.

A setting is reloadable if a running service can use another value at once. All others need a
restart. ``reload`` names them in the log, so that no operator believes that they are in force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import structlog

from daemon.settings import LogSettings, Settings, setting_keys, setting_value
from ledgers.clock import Clock
from ledgers.errors import SettingsError
from replication.records import Record

log = structlog.get_logger()

FOLLOW_S = 2.0
"""How often a service looks for changed settings."""

LOG_SETTINGS = frozenset({"log.format", "log.level"})
RELOADABLE = LOG_SETTINGS | {
    "checks.all_ledgers_interval_s",
    "checks.bytes_per_s",
    "checks.placement_interval_s",
    "checks.reads_per_s",
    "checks.replicas_interval_s",
    "hold.bookies_min",
    "hold.enabled",
    "hold.lasts_s",
    "hold.share",
    "hold.window_s",
    "replication.bytes_per_s",
    "replication.entries_per_s",
    "replication.open_ledger_grace_s",
    "replication.reads_in_flight_per_bookie",
    "replication.retry_max_s",
    "replication.retry_min_s",
    "replication.yields_to_writers",
    "zookeeper.requests_per_s",
}
"""The settings that a running node changes at a reload, by full key."""


class LiveSettings:
    """Holds the settings in force. The main thread replaces them; the services read ``current``.

    ``current`` is an immutable snapshot, replaced as a whole, so no lock is needed.
    """

    def __init__(self, settings: Settings) -> None:
        self.current = settings
        self.orders: dict[str, Record] = {}
        """By path, the last orders that a session could read (``OrderStore``)."""

    async def follow(self, apply: Callable[[Settings], None], *, clock: Clock) -> None:
        """Call ``apply`` with the current settings and after each change, until cancelled."""
        applied: Settings | None = None
        while True:
            if (current := self.current) is not applied:
                apply(current)
                applied = current
            await clock.sleep(FOLLOW_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """What a reload would do. ``settings``: those in force after it.

    ``changed`` and ``needing_restart`` name settings by full key, sorted.
    """

    settings: Settings
    changed: tuple[str, ...]
    needing_restart: tuple[str, ...]


def plan_reload(running: Settings, read: Settings, *, reloadable: Iterable[str]) -> Reload:
    """Return the reload from the settings in force to those that were read."""
    different = {
        key for key in setting_keys() if setting_value(read, key) != setting_value(running, key)
    }
    changed = different & set(reloadable)
    sections: dict[str, dict[str, Any]] = {}
    for key in changed:
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = setting_value(read, key)
    replaced = {
        section: replace(getattr(running, section), **values)
        for section, values in sections.items()
    }
    return Reload(
        settings=replace(running, **replaced),
        changed=tuple(sorted(changed)),
        needing_restart=tuple(sorted(different - changed)),
    )


def reload(
    live: LiveSettings,
    read: Callable[[], Settings],
    *,
    reloadable: Iterable[str],
    apply_log: Callable[[LogSettings], None],
) -> Reload | None:
    """Read the settings again and put the reloadable ones in force. Logs what was done.

    ``apply_log``: called if a setting of the log changes, before anything is logged.
    Returns None if the settings cannot be read or are wrong; then the old ones stay in force.
    """
    try:
        planned = plan_reload(live.current, read(), reloadable=reloadable)
    except SettingsError as error:
        log.error(
            "settings.reload_failed", error=str(error), next_step="correct it and reload again"
        )
        return None
    before, live.current = live.current, planned.settings
    if planned.settings.log != before.log:
        apply_log(planned.settings.log)
    log.info("settings.reloaded", changed=planned.changed)
    if planned.needing_restart:
        log.warning("settings.restart_needed", settings=planned.needing_restart)
    return planned
