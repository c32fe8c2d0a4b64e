"""``bookmender history``: shows what happened in the cluster, when, and who did it."""

from collections.abc import Sequence
from pathlib import Path

import click

from daemon.cli.main import LedgerId, cluster_options
from daemon.cli.option_types import Duration
from daemon.cli.output import echo
from daemon.cli.progress import echo_notes
from daemon.cli.session import run_in_session
from daemon.operations.history import EventRecord, select, time_text
from daemon.words import counted, printable
from ledgers.clock import SystemClock
from replication.history import Kind, read_history


@click.command()
@cluster_options
@click.option(
    "--since",
    "since_s",
    type=Duration(),
    default="1d",
    show_default=True,
    help="How far to look back: 30m, 2h, 7d.",
)
@click.option(
    "--kind",
    "kinds",
    type=click.Choice([kind.value for kind in Kind]),
    multiple=True,
    metavar="KIND",
    help="Only these events, such as order or bookie-lost. May be repeated.",
)
@click.option("--ledger", "ledger_id", type=LedgerId(), help="Only events about this ledger.")
@click.option("--bookie", help="Only events about this bookie.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=1000, show_default=True, help="Events shown."
)
def history(
    config: Path | None,
    output: str,
    since_s: int,
    kinds: tuple[str, ...],
    ledger_id: int | None,
    bookie: str | None,
    limit: int,
) -> None:
    """Show what happened, when, and who did it.

    \b
      bookmender history --since 2h
      bookmender history --kind order    what operators ordered

    Events are losses, marks, repairs, fences, orders, leaders, holds and findings. All nodes record
    theirs in ZooKeeper, so the output is the same on every host. Times are ZooKeeper's. Repairs and
    marks are summed up by cause; each fence is a line. The last seconds before a crash may be
    missing, and so may events before the limits of age and size. What Java's AutoRecovery does is
    not recorded.
    """
    since_ms = SystemClock().wall_ms() - since_s * 1000
    recorded = run_in_session(config, lambda c: read_history(c.store, c.paths, since_ms))
    found = select(
        recorded, since_ms=since_ms, limit=limit, kinds=kinds, ledger_id=ledger_id, bookie=bookie
    )
    echo(output, found, "\n".join(lines_of(found.events)) or "nothing is recorded")
    if found.omitted:
        echo_notes([f"{counted(found.omitted, 'earlier event')} not shown: see --limit"])
    echo_notes(
        [
            f"Events may be missing, because {path} cannot be read."
            for path in found.unreadable_records
        ]
    )


def lines_of(events: Sequence[EventRecord]) -> list[str]:
    """Return a line for each event: time, node, what happened."""
    width = max((len(printable(each.node)) for each in events), default=0)
    return [
        f"{time_text(each.at_ms)}  {printable(each.node):<{width}}  {printable(each.text)}"
        for each in events
    ]
