"""``bookmender check``: shows the periodic checks, and asks the leader to run one."""

import sys
from pathlib import Path

import click

from auditor.checks.placement import UNCOMPARED
from auditor.checks.records import CheckRun
from daemon.admin_session import AdminSession, run_in_session
from daemon.cli.main import EXIT_FAILED, EXIT_UNKNOWN, cluster_options, config_option
from daemon.cli.output import echo, echo_list, list_output_option
from daemon.cli.progress import ProgressLine, echo_notes, explain_interrupt
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


@click.group()
def check() -> None:
    """Show, start or pause the periodic checks of the leader.

    \b
      bookmender check list               last runs, due times and findings
      bookmender check run all-ledgers    run a check now
      bookmender check pause              pause all checks
      bookmender check resume             resume them

    The time of each run is stored where Java's auditor stores it, so Java and bookmender do not
    repeat each other's checks.
    """


@check.command("list")
@config_option
@list_output_option
def list_checks(config: Path | None, output: str) -> None:
    """List the checks: last run, due time, progress and findings.

    The intervals come from this host's settings. The settings of the leader decide.

    Exit codes: 0 listed. 1 an order that concerns checks cannot be read. 3 the record of a check
    cannot be read, so its last run is unknown.
    """
    clock = SystemClock()
    found = run_in_session(config, lambda cluster: read_checks(cluster, clock=clock))
    echo_notes(found.concerns)
    text = found.to_text(now_ms=clock.wall_ms())
    echo_list(output, found.record(), rows="checks", text=lambda: text)
    if found.unreadable_orders:
        sys.exit(EXIT_FAILED)
    sys.exit(EXIT_UNKNOWN if any(row.unreadable for row in found.rows) else 0)


@check.command("run")
@click.argument("name", type=click.Choice(FORCIBLE))
@cluster_options
@click.option("--wait", is_flag=True, help="Wait until the run has ended.")
def run_check(name: str, config: Path | None, output: str, wait: bool) -> None:
    """Ask the leader to run a check now.

    A running check is not restarted. The leader runs one check at a time. Copies on absent bookies
    are not findings: their ledgers are marked when the bookie is lost. Without a configured source
    of racks the check placement has nothing to compare, and reports that.

    Exit codes: 0 requested; with --wait: nothing found. 1 (--wait) something was found.
    3 (--wait) some ledgers could not be checked.
    """
    clock = SystemClock()

    async def act(cluster: AdminSession) -> tuple[Checks, CheckRun | None]:
        before = (await read_checks(cluster, clock=clock)).row(name).last
        await force_check(cluster, name)
        checks = await read_checks(cluster, clock=clock)
        echo_notes(checks.concerns)
        if not wait:
            return checks, None
        after_ms = None if before is None else before.finished_ms
        with ProgressLine() as line:
            run = await wait_checked(cluster, name, after_ms=after_ms, show=line.show, clock=clock)
            return checks, run

    with explain_interrupt("The request stays. bookmender check list shows the progress."):
        checks, run = run_in_session(config, act)
    record = RequestedCheck(
        check=name, leader=checks.leader, run=RunRecord.of(run) if run else None
    )
    text = f"{name}: requested" + (f"; leader: {checks.leader}" if checks.leader else "")
    if run is not None:
        text = f"{name}: checked {counted(run.ledger_count, 'ledger')}: {counts_text(run)}"
    echo(output, record, text)
    sys.exit(0 if run is None else _exit_code(run))


@check.command()
@cluster_options
def pause(config: Path | None, output: str) -> None:
    """Pause all periodic checks until bookmender check resume.

    A running check pauses too. Ledgers of lost bookies are still marked.

    The exit code is 0 even if the checks were already paused.
    """
    has_changed = run_in_session(config, lambda here: pause_checks(here, clock=SystemClock()))
    text = "the checks are paused" if has_changed else "the checks are already paused"
    echo(output, PausedRecord(is_paused=True, has_changed=has_changed), text)


@check.command()
@cluster_options
def resume(config: Path | None, output: str) -> None:
    """Resume the periodic checks. A paused check continues where it was."""
    has_changed = run_in_session(config, resume_checks)
    text = "the checks are resumed" if has_changed else "the checks were not paused"
    echo(output, PausedRecord(is_paused=False, has_changed=has_changed), text)


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
