"""``bookmender status``: prints the state of the cluster's recovery, or what a condition means."""

import difflib
import sys
from pathlib import Path

import click

from daemon.admin_session import run_in_session
from daemon.cli.main import cluster_options, json_option
from daemon.cli.output import echo
from daemon.status.condition import exit_code
from daemon.status.conditions import CONDITIONS, conditions
from daemon.status.gathering import gather_status
from daemon.status.report import status_record, to_text

ALL = "all"


@click.command()
@cluster_options
@json_option
@click.option(
    "--explain",
    "code",
    is_flag=False,
    flag_value=ALL,
    metavar="[CODE]",
    help="Only say what this condition means, and what to do; without CODE: list all codes.",
)
def status(config: Path | None, output: str, code: str | None) -> None:
    """Show the health of the cluster, what is wrong, and what to do.

    Exits 0 for OK, 1 for WARN or ERROR, 3 for UNKNOWN. docs/status.md describes the JSON.
    """
    if code is not None:
        if output == "json":
            raise click.UsageError("--explain prints text only.")
        click.echo(_explained(code))
        return
    found = run_in_session(config, gather_status)
    echo(output, status_record(found), to_text(found))
    sys.exit(exit_code(conditions(found)))


def _explained(code: str) -> str:
    """Return the meaning, usual causes, remedy and end of a condition, or the list of all codes."""
    if code == ALL:
        width = max(map(len, CONDITIONS))
        return "\n".join(f"{each:<{width}}  {entry.summary}" for each, entry in CONDITIONS.items())
    wanted = code.upper().replace("-", "_")
    if wanted not in CONDITIONS:
        near = difflib.get_close_matches(wanted, CONDITIONS, n=1)
        hint = (
            f"Did you mean {near[0]}?" if near else "bookmender status --explain lists all codes."
        )
        raise click.UsageError(f"no condition is called {code!r}. {hint}")
    return CONDITIONS[wanted].to_text()
