"""``bookmender doctor``: shows what could keep bookmender from its work."""

import asyncio
import os
import sys
from pathlib import Path

import click

from daemon.cli.main import EXIT_FAILED, config_option, output_option
from daemon.cli.output import echo
from daemon.cli.session import log_errors_only, settings_for_command
from daemon.operations.doctor import Diagnosis, Level, diagnose, worst
from daemon.settings_source import find_source
from ledgers.clock import SystemClock


@click.command()
@config_option
@output_option
@click.option("--write", "writes", is_flag=True, help="Also create and delete a temporary znode.")
def doctor(config: Path | None, output: str, writes: bool) -> None:
    """Check host, ZooKeeper, bookies and settings.

    Within 10 s it shows what could keep bookmender from its work, and what to do. bookmender status
    shows how the ledgers are. Nothing is written, unless --write is given: only then clocks are
    compared.

    Exit codes: 0 everything is OK. 1 warnings or errors. 2 the settings are wrong.
    """
    settings = settings_for_command(config)
    log_errors_only(settings)
    file = find_source(config, os.environ).file
    found = asyncio.run(diagnose(settings, file, writes=writes, clock=SystemClock()))
    diagnosis = Diagnosis(level=worst(found), findings=found)
    echo(output, diagnosis, "\n".join(each.to_text() for each in found))
    sys.exit(0 if diagnosis.level is Level.OK else EXIT_FAILED)
