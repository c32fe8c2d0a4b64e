"""``bookmender check``."""

import json
import sys
from pathlib import Path

import click

from auditor.checks.placement import UNCOMPARED
from auditor.checks.records import CheckRun
from daemon.cli import EXIT_FAILED, EXIT_UNKNOWN, config_option, output_option
from daemon.operating.check_rows import Checks, counts_text, run_record
from daemon.operating.checks import (
    FORCIBLE,
    force_check,
    pause_checks,
    read_checks,
    resume_checks,
    wait_checked,
)
from daemon.operating.progress import ProgressLine, counted, saying_when_interrupted, tell
from daemon.visit import Visit, run_visit
from ledgers.clock import SystemClock


@click.group()
def check() -> None:
    """The periodic checks: what the leader looks at from time to time.

    \b
      bookmender check list                 when each ran, is due, how far it is, what it found
      bookmender check run all-ledgers      now, whenever it is due
      bookmender check pause                until bookmender check resume

    When a check ran last stands where Java's auditor keeps it, so that either goes by the other's
    runs.
    """


@check.command("list")
@config_option
@output_option
def list_checks(config: Path | None, output: str) -> None:
    """Each check: its last run, when it is due, how far it is now, and what the last run found.

    The intervals are those of this host's settings; the leader's decide.
    """
    clock = SystemClock()
    found = run_visit(config, lambda cluster: read_checks(cluster, clock=clock))
    tell(found.concerns)
    if output == "json":
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        click.echo(found.to_text(now_ms=clock.wall_ms()))


@check.command("run")
@click.argument("name", type=click.Choice(FORCIBLE))
@config_option
@output_option
@click.option("--wait", is_flag=True, help="Until it has ended. Ctrl-C leaves it running.")
def run_check(name: str, config: Path | None, output: str, wait: bool) -> None:
    """Ask for a check now; the leader runs it, after one that runs already.

    One that runs now is not begun anew. With --wait exits 0 when all was well, 1 when something was
    found, 3 when that could not be told of some ledgers. What is on a bookie that is away is no
    check's business: its ledgers are marked once it is lost, and bookmender status tells of them.
    Where no source of racks is set, placement has nothing to compare: it says so, and all is well.
    """
    clock = SystemClock()

    async def act(cluster: Visit) -> tuple[Checks, CheckRun | None]:
        before = (await read_checks(cluster, clock=clock)).row(name).last
        await force_check(cluster, name)
        checks = await read_checks(cluster, clock=clock)
        tell(checks.concerns)
        if not wait:
            return checks, None
        line = ProgressLine("ledger")
        after_ms = None if before is None else before.finished_ms
        try:
            run = await wait_checked(cluster, name, after_ms=after_ms, show=line.show, clock=clock)
            return checks, run
        finally:
            line.close()

    with saying_when_interrupted(
        f"what was asked for stands: bookmender check list tells of {name}"
    ):
        checks, run = run_visit(config, act)
    if output == "json":
        record = {"check": name, "leader": checks.leader, "run": run_record(run) if run else None}
        click.echo(json.dumps(record, indent=2))
    elif run is not None:
        click.echo(
            f"{name}: looked at {counted(run.ledger_count, 'ledger')}, found {counts_text(run)}"
        )
    else:
        click.echo(f"{name}: asked for" + (f"; {checks.leader} leads" if checks.leader else ""))
    sys.exit(0 if run is None else _exit_code(run))


@check.command()
@config_option
@output_option
def pause(config: Path | None, output: str) -> None:
    """Let every check wait, one that runs included, until bookmender check resume.

    Lost bookies are marked as ever. That they are paused already is no error.
    """
    _report(
        output,
        is_paused=True,
        has_changed=run_visit(config, lambda cluster: pause_checks(cluster, clock=SystemClock())),
    )


@check.command()
@config_option
@output_option
def resume(config: Path | None, output: str) -> None:
    """Let the checks run again; one that waits goes on where it was."""
    _report(output, is_paused=False, has_changed=run_visit(config, resume_checks))


def _report(output: str, *, is_paused: bool, has_changed: bool) -> None:
    if output == "json":
        click.echo(json.dumps({"is_paused": is_paused, "has_changed": has_changed}, indent=2))
        return
    state = "are paused" if is_paused else "run when they are due"
    click.echo(f"the checks {state}" + ("" if has_changed else ", as before"))


NOTHING_WRONG = (
    *("gone", "skipped", "open", "strict", "soft", "open_strict", "open_soft"),
    UNCOMPARED,
)
NOTHING_KNOWN = ("unknown", "open_unknown", "unopened", "unreadable", "failed")


def _exit_code(run: CheckRun) -> int:
    kinds = {kind for kind, count in run.counts.items() if count and kind not in NOTHING_WRONG}
    if kinds.difference(NOTHING_KNOWN):
        return EXIT_FAILED
    return EXIT_UNKNOWN if kinds else 0
