"""``bookmender status``: prints the state of the cluster's recovery, or what a condition means, and
mutes conditions."""

import os
import re
import sys
from pathlib import Path

import click

from daemon.admin_session import AdminSession, shared_clock
from daemon.cli.main import cluster_options, json_option
from daemon.cli.option_types import Duration, ReasonText
from daemon.cli.output import echo
from daemon.cli.session import run_in_session, settings_for_command
from daemon.cli.status_watch import watch
from daemon.operations.history import time_text
from daemon.operations.mutes import mute, unmute
from daemon.status.condition import CONDITIONS, Entry, entry_of, exit_code
from daemon.status.conditions import conditions
from daemon.status.gathering import gather_status
from daemon.status.report import status_record, to_text

ALL = "all"
WATCH_S = 2
COLOURS = {"OK": "green", "UNKNOWN": "magenta", "WARN": "yellow", "ERROR": "red", "INFO": "cyan"}


class Condition(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A code of a condition, in any case."""

    name = "code"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Entry:
        try:
            return entry_of(str(value))
        except LookupError as error:
            raise click.UsageError(str(error)) from error


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
@click.option(
    "--watch",
    "interval_s",
    type=click.IntRange(1, 3600),
    is_flag=False,
    flag_value=WATCH_S,
    metavar="[SECONDS]",
    help=f"Show it again and again, every {WATCH_S} s by default.",
)
@click.option("--mute", "muted", type=Condition(), help="Do not count this condition for a time.")
@click.option("--for", "duration_s", type=Duration(), help="With --mute: such as 30m, 2h, 1d.")
@click.option("--reason", type=ReasonText(), default="", help="With --mute: shown with it.")
@click.option("--unmute", "unmuted", type=Condition(), help="Count this condition again.")
def status(
    config: Path | None,
    output: str,
    code: str | None,
    interval_s: int | None,
    muted: Entry | None,
    duration_s: int | None,
    reason: str,
    unmuted: Entry | None,
) -> None:
    """Show the cluster's health and what to do.

    \b
      bookmender status
      bookmender status --watch                     show it again and again
      bookmender status --explain BOOKIES_LOST      what this condition means
      bookmender status --mute BOOKIES_LOST --for 2h --reason "disk ordered"

    A muted condition is shown, but counts neither for the health and the exit code nor for alerts.
    It counts again when it becomes more severe or names another bookie. Conditions that say that
    data is lost or unavailable cannot be muted.

    Exit codes: 0 OK. 1 WARN or ERROR. 3 UNKNOWN. docs/status.md has the conditions and the JSON.
    """
    if sum(each is not None for each in (code, interval_s, muted, unmuted)) > 1:
        raise click.UsageError("Give one of --explain, --watch, --mute and --unmute.")
    if (muted is None) != (duration_s is None) or (reason and muted is None):
        raise click.UsageError("--mute needs --for, and only --mute has --for and --reason.")
    if output == "json" and (interval_s is not None or code is not None):
        raise click.UsageError("--explain and --watch print text only.")
    if code is not None:
        click.echo(_explained(code))
        return
    if interval_s is not None:
        watch(settings_for_command(config), interval_s=interval_s, paint=coloured)

    async def act(cluster: AdminSession) -> str:
        clock = await shared_clock(cluster)
        if muted is not None and duration_s is not None:
            await mute(cluster, muted, duration_s=duration_s, reason=reason, clock=clock)
            until = time_text(clock.wall_ms() + duration_s * 1000)
            return f"{muted.code} is muted until {until}"
        assert unmuted is not None
        was_muted = await unmute(cluster, unmuted, clock=clock)
        return f"{unmuted.code} {'counts again' if was_muted else 'was not muted'}"

    if muted or unmuted:
        done = run_in_session(config, act)
        echo(output, {"result": done}, done)
        return
    found = run_in_session(config, gather_status)
    echo(output, status_record(found), coloured(to_text(found)))
    sys.exit(exit_code(conditions(found)))


def coloured(text: str) -> str:
    """Return the text with coloured severities, or as it is without colours."""
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return text

    def paint(found: re.Match[str]) -> str:
        return found[1] + click.style(found[2], fg=COLOURS[found[2]], bold=True)

    words = "|".join(COLOURS)
    return re.sub(rf"^((?:[A-Z_]+  +)?)({words})\b", paint, text, flags=re.MULTILINE)


def _explained(code: str) -> str:
    """Return the meaning, usual causes, remedy and end of a condition, or the list of all codes."""
    if code == ALL:
        width = max(map(len, CONDITIONS))
        return "\n".join(f"{each:<{width}}  {entry.summary}" for each, entry in CONDITIONS.items())
    try:
        return entry_of(code).to_text()
    except LookupError as error:
        raise click.UsageError(str(error)) from error
