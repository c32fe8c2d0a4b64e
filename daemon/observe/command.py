"""``bookmender observe``."""

import asyncio
import json
import os
import sys
import time
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path

import click

from auditor.ledger_map_updater import LedgerMapUpdater
from daemon.admin_session import log_errors_only
from daemon.cli.main import EXIT_FAILED, EXIT_UNKNOWN, config_option, json_option, output_option
from daemon.cli.progress import LINE_INTERVAL_S, Line
from daemon.observe.observing import PLANNED_MAX, Sight, open_observing
from daemon.observe.report import to_record, to_text
from daemon.settings import Settings, load_settings
from daemon.threads import own_cause


@click.command()
@config_option
@output_option
@json_option
@click.option("--watch", is_flag=True, help="Show each change, until Ctrl-C.")
@click.option(
    "--plan",
    "planned_max",
    metavar="N",
    type=click.IntRange(min=0, max=1_000),
    default=PLANNED_MAX,
    show_default=True,
    help="Number of ledgers to plan repairs for. 0: bookies are not asked anything.",
)
def observe(config: Path | None, output: str, watch: bool, planned_max: int) -> None:
    """Show what a node would mark and repair now. Changes nothing.

    \b
      bookmender observe             once, in the foreground
      bookmender observe --watch     again after each change

    It reads all metadata, decides as a leader would, and compares the result with the existing
    marks. It votes for no leader, takes no lock and fences nothing; its ZooKeeper session cannot
    write. So it may run beside Java's AutoRecovery. An absent bookie is lost after the recovery
    delay, counted from the start of this command if no bookmender leader recorded the absence.
    docs/json.md describes the JSON.

    Exit codes: 0 nothing to do except what operators ordered. 1 something to do, or a bookie with
    ledgers is absent. 3 unknown: ZooKeeper or some metadata cannot be read.
    """
    settings = load_settings(config, os.environ)
    log_errors_only(settings)
    try:
        sight = asyncio.run(_observe(settings, output, planned_max, is_watching=watch))
    except BaseExceptionGroup as group:
        if (cause := own_cause(group)) is None:
            raise
        raise cause from group
    sys.exit(exit_code(sight))


async def _observe(
    settings: Settings, output: str, planned_max: int, *, is_watching: bool
) -> Sight:
    """Look at the cluster, print the result and return it. With ``is_watching``, repeat until the
    session ends."""
    async with open_observing(settings) as observing:
        await built(observing.updater)
        if not is_watching:
            sight = await observing.look(planned_max=planned_max)
            _print(sight, output, is_one=True)
            return sight
        before = ""
        async with aclosing(observing.looks(planned_max=planned_max)) as sights:
            async for sight in sights:
                text = to_text(sight)
                if text != before:
                    _print(sight, output, is_one=False)
                before = text
    raise AssertionError("the observer ended without an error")


async def built(updater: LedgerMapUpdater) -> None:
    """Wait until every ledger is known that ACLs do not hide, and show the progress.

    Raises UnauthorizedError if an ACL denies access to the root: waiting may never end.
    """
    with Line(due_s=time.monotonic() + LINE_INTERVAL_S) as line:
        while not (updater.completed_count and updater.is_up_to_date):
            if updater.refusal is not None:
                raise updater.refusal
            seen = updater.change_count
            line.write(f"{len(updater.ledger_map):,} ledgers read", now_s=time.monotonic())
            await updater.wait_change(seen)


def _print(sight: Sight, output: str, *, is_one: bool) -> None:
    if output == "json":
        click.echo(json.dumps(to_record(sight), indent=2 if is_one else None))
        return
    if not is_one:
        seen = datetime.fromtimestamp(sight.observation.seen_ms / 1000, tz=UTC)
        click.echo(f"--- {seen:%Y-%m-%d %H:%M:%S} UTC")
    click.echo(to_text(sight))


def exit_code(sight: Sight) -> int:
    """Return the exit code that ``--help`` describes."""
    seen = sight.observation
    is_named = any(row.ledger_count for row in seen.affected)
    if seen.underreplicated or seen.marked_count or seen.private.damaged or is_named:
        return EXIT_FAILED
    return EXIT_UNKNOWN if seen.unreadable or not seen.is_ledger_map_complete else 0
