"""SIGHUP: which settings change at once, which need a restart, and what a broken file does."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import structlog

from daemon.live_settings import (
    FOLLOW_S,
    LOG_SETTINGS,
    RELOADABLE,
    LiveSettings,
    plan_reload,
    reload,
)
from daemon.settings import LogSettings, Settings
from ledgers.clock import SystemClock
from tests.daemon.settings_given import URI, URI_LINE, load
from tests.replication.cluster import in_virtual_time

BEFORE = Settings(metadata_service_uri=URI)


def changed(key: str, value: Any) -> Settings:
    section, name = key.split(".")
    return dataclasses.replace(
        BEFORE, **{section: dataclasses.replace(getattr(BEFORE, section), **{name: value})}
    )


def test_every_reloadable_setting_exists() -> None:
    for key in RELOADABLE:
        section, name = key.split(".")
        assert hasattr(getattr(BEFORE, section), name), key


def test_a_reloadable_setting_comes_into_force() -> None:
    read = changed("hold.share", 0.5)

    planned = plan_reload(BEFORE, read, reloadable=RELOADABLE)

    assert planned.settings == read
    assert (planned.changed, planned.needing_restart) == (("hold.share",), ())


def test_a_setting_that_needs_a_restart_keeps_its_value_and_is_named() -> None:
    read = dataclasses.replace(
        changed("replication.ledgers_at_once", 7),
        metadata_service_uri="zk://127.0.0.1:9/ledgers",
        hold=dataclasses.replace(BEFORE.hold, window_s=5.0),
    )

    planned = plan_reload(BEFORE, read, reloadable=RELOADABLE)

    assert planned.settings == changed("hold.window_s", 5.0)
    assert planned.changed == ("hold.window_s",)
    assert planned.needing_restart == ("metadata_service_uri", "replication.ledgers_at_once")


def test_a_setting_that_needs_a_restart_is_named_at_each_reload() -> None:
    read = changed("replication.target", "local")

    once = plan_reload(BEFORE, read, reloadable=RELOADABLE)
    again = plan_reload(once.settings, read, reloadable=RELOADABLE)

    assert again.needing_restart == ("replication.target",)


def test_a_node_that_observes_reloads_its_log_only() -> None:
    planned = plan_reload(BEFORE, changed("hold.share", 0.5), reloadable=LOG_SETTINGS)

    assert planned.settings == BEFORE
    assert planned.needing_restart == ("hold.share",)


def test_a_reload_logs_names_and_no_values() -> None:
    live, applied = LiveSettings(BEFORE), list[LogSettings]()
    read = dataclasses.replace(
        changed("replication.default_password", "secret"),
        log=dataclasses.replace(BEFORE.log, level="debug"),
    )

    with structlog.testing.capture_logs() as events:
        reload(live, lambda: read, reloadable=RELOADABLE, apply_log=applied.append)

    assert applied == [read.log]
    assert live.current.log.level == "debug"
    assert events == [
        {"event": "settings.reloaded", "changed": ("log.level",), "log_level": "info"},
        {
            "event": "settings.restart_needed",
            "settings": ("replication.default_password",),
            "log_level": "warning",
        },
    ]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("metadata_service_uri = ", id="not TOML"),
        pytest.param(f"{URI_LINE}x = {'[' * 5_000}", id="nested too deeply"),
        pytest.param(f"{URI_LINE}[hold]\nshare = {'9' * 5_000}\n", id="a number that is too long"),
        pytest.param(f"{URI_LINE}[hold]\nshare = 2.0\n", id="a value that is not allowed"),
        pytest.param(f"{URI_LINE}[hold]\nshar = 0.5\n", id="an unknown setting"),
    ],
)
def test_a_broken_file_keeps_the_old_settings_and_says_why(tmp_path: Path, text: str) -> None:
    live = LiveSettings(BEFORE)

    with structlog.testing.capture_logs() as events:
        reloaded = reload(
            live,
            lambda: load(tmp_path, text),
            reloadable=RELOADABLE,
            apply_log=lambda settings: pytest.fail("the log must stay as it is"),
        )

    assert reloaded is None
    assert live.current is BEFORE
    assert [(event["event"], event["log_level"]) for event in events] == [
        ("settings.reload_failed", "error")
    ]
    assert "bookmender.toml" in events[0]["error"]


@in_virtual_time
async def test_a_follower_gets_the_settings_at_once_and_after_each_change() -> None:
    live, seen = LiveSettings(BEFORE), list[Settings]()
    following = asyncio.create_task(live.follow(seen.append, clock=SystemClock()))
    await asyncio.sleep(3 * FOLLOW_S)
    assert seen == [BEFORE]

    live.current = after = changed("hold.share", 0.5)
    await asyncio.sleep(3 * FOLLOW_S)
    assert seen == [BEFORE, after]

    following.cancel()
