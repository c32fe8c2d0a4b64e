"""``bookmender bookie``."""

import json
import sys
from pathlib import Path

import click

from daemon.admin_session import AdminSession, run_in_session
from daemon.cli.bookies import BookieRow, bookie_rows, missed, with_losses
from daemon.cli.decommission import decommission
from daemon.cli.drain import drain
from daemon.cli.identities import trust_identities
from daemon.cli.main import EXIT_FAILED, config_option, output_option
from daemon.cli.maintenance import maintenance
from daemon.cli.orders import unreadable_texts
from daemon.cli.progress import counted, echo_notes
from daemon.status.leader import losses_due_ms
from ledgers.clock import Clock, SystemClock
from replication.orders import OrderBook


@click.group()
def bookie() -> None:
    """Single bookies: their state, and what is ordered of them.

    \b
    To take one out of service while it runs:
      bookmender bookie drain ID --wait        move all that it holds elsewhere
      (stop it)
      bookmender bookie decommission ID        forget it
    To restart its host without anything being copied:
      bookmender bookie maintenance ID --for 30m
    """


@bookie.command("list")
@config_option
@output_option
@click.option("--room", is_flag=True, help="Ask each bookie how full its disks are, too.")
def list_bookies(config: Path | None, output: str, room: bool) -> None:
    """Every bookie the cluster knows, its state, and what is ordered of it.

    \b
      writable   takes reads and writes
      read-only  takes reads only
      lost       not registered, for the recovery delay at least: its ledgers are copied elsewhere
      away       not registered, but under maintenance, or the recovery delay is not over yet

    Exits 1 when an order cannot be read: it says which, and what to do.
    """

    rows, unreadable = run_in_session(
        config, lambda cluster: gather_bookies(cluster, clock=SystemClock(), with_room=room)
    )
    if output == "json":
        record = {"bookies": [row.to_json() for row in rows], "unreadable_orders": [*unreadable]}
        click.echo(json.dumps(record, indent=2))
    else:
        for row in rows:
            click.echo(row.to_text(now_ms=SystemClock().wall_ms()))
        click.echo(counted(len(rows), "bookie"))
    echo_notes(unreadable_texts(unreadable))
    sys.exit(EXIT_FAILED if unreadable else 0)


async def gather_bookies(
    cluster: AdminSession, *, clock: Clock, with_room: bool = False
) -> tuple[list[BookieRow], tuple[str, ...]]:
    """And the paths of orders that cannot be read. Raises UnavailableError."""
    orders = await OrderBook(cluster.store, cluster.ur).read()
    rows = await bookie_rows(cluster, orders, clock=clock, with_room=with_room)
    due_ms = await losses_due_ms(cluster, missed(rows), clock=clock)
    return with_losses(rows, due_ms), orders.unreadable


bookie.add_command(drain)
bookie.add_command(maintenance)
bookie.add_command(decommission)
bookie.add_command(trust_identities)
