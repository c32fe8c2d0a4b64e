"""``bookmender status``: prints the state of the cluster's recovery. ``bookmender health explain``:
prints what a condition means."""

import difflib
import sys
from pathlib import Path

import click

from daemon.admin_session import run_in_session
from daemon.answers import as_json
from daemon.cli.main import config_option, json_option, output_option
from daemon.status.condition import exit_code
from daemon.status.conditions import CONDITIONS, conditions
from daemon.status.gathering import gather_status
from daemon.status.report import status_record, to_text


@click.command()
@config_option
@output_option
@json_option
def status(config: Path | None, output: str) -> None:
    """Show the health of the cluster, what is wrong, and what to do.

    Exits 0 for OK, 1 for WARN or ERROR, 3 for UNKNOWN. bookmender health explain CODE explains a
    condition. docs/status.md describes the JSON.
    """
    found = run_in_session(config, gather_status)
    click.echo(as_json(status_record(found)) if output == "json" else to_text(found))
    sys.exit(exit_code(conditions(found)))


@click.group()
def health() -> None:
    """Explain the conditions that bookmender status reports."""


@health.command("explain")
@click.argument("code", required=False)
def explain_code(code: str | None) -> None:
    """Explain one condition of bookmender status.

    The text gives its meaning, its usual causes, what to do, and how it clears.

    Without CODE: list all codes.
    """
    if code is None:
        width = max(map(len, CONDITIONS))
        for each, entry in CONDITIONS.items():
            click.echo(f"{each:<{width}}  {entry.summary}")
        return
    wanted = code.upper().replace("-", "_")
    if wanted not in CONDITIONS:
        near = difflib.get_close_matches(wanted, CONDITIONS, n=1)
        hint = f"Did you mean {near[0]}?" if near else "bookmender health explain lists all codes."
        raise click.UsageError(f"no condition is called {code!r}. {hint}")
    click.echo(CONDITIONS[wanted].to_text())
