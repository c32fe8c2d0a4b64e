"""``bookmender observe``."""

import asyncio
import json
import os
import sys
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path

import click

from auditor.ledger_map_updater import LedgerMapUpdater
from daemon.admin_session import log_errors_only
from daemon.cli.main import EXIT_FAILED, EXIT_UNKNOWN, config_option, json_option, output_option
from daemon.cli.progress import CountLine
from daemon.observe.observing import PLANNED_MAX, Sight, open_observing
from daemon.observe.report import to_record, to_text
from daemon.settings import Settings, load_settings
from daemon.threads import own_cause


@click.command()
@config_option
@output_option
@json_option
@click.option("--watch", is_flag=True, help="Go on, and show each change, until Ctrl-C.")
@click.option(
    "--plan",
    "planned_max",
    metavar="N",
    type=click.IntRange(min=0, max=1_000),
    default=PLANNED_MAX,
    show_default=True,
    help="Ledgers to plan repairs for. 0: no bookie is asked anything.",
)
def observe(config: Path | None, output: str, watch: bool, planned_max: int) -> None:
    """What a node of ours would mark and repair now, whoever does. Changes nothing.

    \b
      bookmender observe             once, in the foreground
      bookmender observe --watch     and whenever something has changed

    It reads all metadata, decides as our leader would, and compares that with the marks that stand:
    so it may run beside Java's AutoRecovery, before a node does. It stands for no election and
    takes no lock; its session with ZooKeeper cannot write, and no ledger is fenced. A node does the
    like in the background with node.mode = "observe", and leaves what it saw in observe.json in its
    state directory.

    A bookie that is away is lost after the recovery delay. Once, that counts from now, unless a
    leader of ours noted since when.

    As JSON (with --watch one object a line): index; bookies, with those missing (state: lost,
    waiting for left_s, reformatted: set up anew); hold, is_disabled: what keeps from marking;
    endangered: the ledgers that miss copies, most endangered first; would_mark: how many of them
    would be marked now; marks: total, those standing in the queue shared with Java, agreed,
    unmarked (we would make them, and nobody has), partly_marked (they stand, for fewer bookies than
    are lost), surplus (we would not make them), own_marked (in our private queue, where Java does not
    look), own_damaged (of these, with damage that Java does not see); would_repair: as bookmender
    plan --json.

    Exits 0 when nothing would be done but what operators ordered (drains, repairs by hand), 1 when
    something would or a bookie is away that ledgers name, 3 when it could not tell: also when no
    ledger misses anything, but the metadata of some cannot be read, or when ZooKeeper's ACLs keep
    from listing some of them.
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
    """Returns at the first look, unless it is to go on."""
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
    raise AssertionError("it looks until the session ends")


async def built(updater: LedgerMapUpdater) -> None:
    """Wait until every ledger is known, and show how far that is.

    Raises UnauthorizedError where ACLs shut a directory away: that may stay so for ever.
    """
    line = CountLine("ledgers read")
    try:
        while not updater.is_complete:
            if updater.refusal is not None:
                raise updater.refusal
            seen = updater.change_count
            line.show(len(updater.ledger_map))
            await updater.wait_change(seen)
    finally:
        line.close()


def _print(sight: Sight, output: str, *, is_one: bool) -> None:
    if output == "json":
        click.echo(json.dumps(to_record(sight), indent=2 if is_one else None))
        return
    if not is_one:
        seen = datetime.fromtimestamp(sight.observation.seen_ms / 1000, tz=UTC)
        click.echo(f"--- {seen:%Y-%m-%d %H:%M:%S} UTC")
    click.echo(to_text(sight))


def exit_code(sight: Sight) -> int:
    seen = sight.observation
    is_something_away = any(row.ledger_count for row in seen.missing)
    if seen.underreplicated or seen.marked_count or seen.own.damaged or is_something_away:
        return EXIT_FAILED
    return EXIT_UNKNOWN if seen.unreadable or not seen.is_index_complete else 0
