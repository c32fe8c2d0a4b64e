"""``bookmender check``: shows the periodic checks, runs one, or pauses all of them."""

import sys
from pathlib import Path
from typing import NoReturn

import click

from auditor.checks.placement import UNCOMPARED
from auditor.checks.records import CheckRun
from daemon.admin_session import AdminSession
from daemon.cli.main import EXIT_FAILED, EXIT_UNKNOWN
from daemon.cli.output import echo, echo_list, list_options
from daemon.cli.progress import ProgressLine, echo_notes, explain_interrupt
from daemon.cli.session import run_in_session
from daemon.operations.checks import (
    FORCIBLE,
    Checks,
    PausedRecord,
    RequestedCheck,
    RunRecord,
    counts_text,
    force_check,
    pause_checks,
    read_checks,
    resume_checks,
    wait_checked,
)
from daemon.words import counted
from ledgers.clock import SystemClock


@click.command(epilog=f"NAME is one of: {', '.join(FORCIBLE)}.")
@click.argument("name", metavar="[NAME]", type=click.Choice(FORCIBLE), required=False)
@list_options
@click.option("--wait", is_flag=True, help="With NAME: wait until the run has ended.")
@click.option("--pause", "pauses", is_flag=True, help="Pause all checks until --resume.")
@click.option("--resume", "resumes", is_flag=True, help="Resume them where they were.")
def check(
    name: str | None,
    config: Path | None,
    output: str,
    wait: bool,
    pauses: bool,
    resumes: bool,
) -> None:
    """Show, run or pause the periodic checks.

    \b
      bookmender check                last runs, due times, progress and findings
      bookmender check all-ledgers    ask the leader to run a check now
      bookmender check --pause        pause all checks, also a running one

    The leader runs one check at a time, and does not restart a running one. Its settings decide on
    the intervals; those of this host are shown. Ledgers on absent bookies are no findings: they are
    marked when the bookie is lost, also during a pause.

    Exit codes: 0 listed, requested or done; with --wait: nothing found. 1 something was found, or
    an order that concerns checks cannot be read. 3 the record of a check cannot be read, or some
    ledgers could not be checked.
    """
    if bool(name) + pauses + resumes > 1:
        raise click.UsageError("Give only one of: NAME, --pause, --resume.")
    if wait and name is None:
        raise click.UsageError("--wait needs the NAME of a check.")
    if name is not None:
        _run(name, config, output, waits=wait)
    clock = SystemClock()
    if pauses:
        has_changed = run_in_session(config, lambda here: pause_checks(here, clock=clock))
        text = f"the checks are {'' if has_changed else 'already '}paused"
        echo(output, PausedRecord(is_paused=True, has_changed=has_changed), text)
        return
    if resumes:
        has_changed = run_in_session(config, resume_checks)
        text = f"the checks {'are resumed' if has_changed else 'were not paused'}"
        echo(output, PausedRecord(is_paused=False, has_changed=has_changed), text)
        return
    found = run_in_session(config, lambda cluster: read_checks(cluster, clock=clock))
    echo_notes(found.concerns)
    text = found.to_text(now_ms=clock.wall_ms())
    echo_list(output, found.record(), rows="checks", text=lambda: text)
    if found.unreadable_orders:
        sys.exit(EXIT_FAILED)
    sys.exit(EXIT_UNKNOWN if any(row.unreadable for row in found.rows) else 0)


def _run(name: str, config: Path | None, output: str, *, waits: bool) -> NoReturn:
    """Ask the leader to run the check, print what it answers, and exit."""
    clock = SystemClock()

    async def act(cluster: AdminSession) -> tuple[Checks, CheckRun | None]:
        before = (await read_checks(cluster, clock=clock)).row(name).last
        await force_check(cluster, name)
        checks = await read_checks(cluster, clock=clock)
        echo_notes(checks.concerns)
        if not waits:
            return checks, None
        after_ms = None if before is None else before.finished_ms
        with ProgressLine() as line:
            run = await wait_checked(cluster, name, after_ms=after_ms, show=line.show, clock=clock)
            return checks, run

    with explain_interrupt("The request stays. bookmender check shows the progress."):
        checks, run = run_in_session(config, act)
    record = RequestedCheck(
        check=name, leader=checks.leader, run=RunRecord.of(run) if run else None
    )
    text = f"{name}: requested" + (f"; leader: {checks.leader}" if checks.leader else "")
    if run is not None:
        text = f"{name}: checked {counted(run.ledger_count, 'ledger')}: {counts_text(run.counts)}"
    echo(output, record, text)
    sys.exit(0 if run is None else _exit_code(run))


NOTHING_WRONG = (
    *("deleted", "skipped", "open", "strict", "soft", "open_strict", "open_soft"),
    UNCOMPARED,
)

NOTHING_KNOWN = ("unknown", "open_unknown", "unreadable", "failed")


def _exit_code(run: CheckRun) -> int:
    kinds = {kind for kind, count in run.counts.items() if count and kind not in NOTHING_WRONG}
    if kinds.difference(NOTHING_KNOWN):
        return EXIT_FAILED
    return EXIT_UNKNOWN if kinds else 0
