"""``bookmender history``: shows what happened in the cluster, when, and who did it."""

import json
from collections.abc import Collection
from pathlib import Path

import click

from daemon.admin_session import AdminSession, run_in_session
from daemon.cli.main import LedgerId, config_option, output_option
from daemon.cli.option_types import Duration
from daemon.cli.progress import echo_notes
from daemon.history_texts import event_text, history_record, time_text
from daemon.words import counted, printable
from ledgers.clock import SystemClock
from replication.history import Kind, NodeEvent, read_history


@click.command()
@config_option
@output_option
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
    """Show what happened: losses, marks, repairs, fences, orders, leaders, holds, findings.

    All nodes record their events in ZooKeeper, so the output is the same on every host. Times are
    ZooKeeper's. Repairs and marks are summed up by cause; each fence is a line. The last seconds
    before a crash may be missing, and so may events before the limits of age and size. What Java's
    AutoRecovery does is not recorded.
    """
    since_ms = SystemClock().wall_ms() - since_s * 1000

    async def look(cluster: AdminSession) -> tuple[list[NodeEvent], tuple[str, ...]]:
        recorded = await read_history(cluster.store, cluster.paths, since_ms)
        return [
            noted
            for noted in recorded.events
            if is_about(noted, kinds=kinds, ledger_id=ledger_id, bookie=bookie)
        ], recorded.unreadable

    events, unreadable = run_in_session(config, look)
    shown = events[-limit:]
    if output == "json":
        record = history_record(events, since_ms=since_ms, limit=limit, unreadable=unreadable)
        click.echo(json.dumps(record, indent=2))
    else:
        for line in lines_of(shown):
            click.echo(line)
        if not events:
            click.echo("nothing is recorded")
    if len(events) > len(shown):
        echo_notes([f"{counted(len(events) - len(shown), 'earlier event')} not shown: see --limit"])
    echo_notes([f"Events may be missing, because {path} cannot be read." for path in unreadable])


def is_about(
    noted: NodeEvent, *, kinds: Collection[str], ledger_id: int | None, bookie: str | None
) -> bool:
    """Return True if the event passes the filters. An empty filter passes everything."""
    event = noted.event
    return (
        (not kinds or event.kind in kinds)
        and ledger_id in (None, event.ledger_id)
        and (bookie is None or bookie in event.bookies)
    )


def lines_of(events: Collection[NodeEvent]) -> list[str]:
    """Return a line for each event: time, node, what happened."""
    nodes = {noted.node: printable(noted.node) for noted in events}
    width = max((len(name) for name in nodes.values()), default=0)
    return [
        f"{time_text(noted.event.at_ms)}  {nodes[noted.node]:<{width}}  "
        f"{printable(event_text(noted.event))}"
        for noted in events
    ]
