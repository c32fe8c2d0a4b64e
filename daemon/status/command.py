"""``bookmender status``: prints the state of the cluster's recovery."""

import json
import sys
from pathlib import Path

import click

from daemon.admin_session import run_in_session
from daemon.cli.main import config_option, json_option, output_option
from daemon.status.conditions import conditions, exit_code
from daemon.status.gathering import gather_status
from daemon.status.report import to_json, to_text


@click.command()
@config_option
@output_option
@json_option
def status(config: Path | None, output: str) -> None:
    """Health of the cluster, what is wrong, and what to do.

    Exits 0 for OK, 1 for WARN or ERROR, 3 for UNKNOWN. bookmender health explain CODE explains a
    condition. docs/status.md describes the JSON.
    """
    found = run_in_session(config, gather_status)
    click.echo(json.dumps(to_json(found), indent=2) if output == "json" else to_text(found))
    sys.exit(exit_code(conditions(found)))
