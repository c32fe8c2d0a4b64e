"""The settings and the session of a command."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import click

from daemon.admin_session import AdminSession, admin_session
from daemon.logs import set_up_logs
from daemon.settings import Settings
from daemon.settings_source import find_source

T = TypeVar("T")


def settings_for_command(
    given: Path | None, environment: Mapping[str, str] = os.environ
) -> Settings:
    """Find and read the settings. Says on standard error if they are those of a local cluster.
    Raises SettingsError."""
    source = find_source(given, environment)
    settings = source.load()
    if source.local_cluster:
        click.echo(f"using the local cluster: {settings.metadata_service_uri}", err=True)
    return settings


def log_errors_only(settings: Settings) -> None:
    """Log errors only, to standard error. Commands print their results."""
    set_up_logs(replace(settings.log, level="error"))


def run_in_session(config: Path | None, action: Callable[[AdminSession], Awaitable[T]]) -> T:
    """Open a session, run ``action`` in it, close the session, and return the result."""
    return run_with(settings_for_command(config), action)


def run_with(settings: Settings, action: Callable[[AdminSession], Awaitable[T]]) -> T:
    """Do what ``run_in_session`` does, with settings that are loaded already."""
    log_errors_only(settings)

    async def run() -> T:
        async with admin_session(settings) as cluster:
            return await action(cluster)

    return asyncio.run(run())
