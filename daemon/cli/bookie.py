"""``bookmender bookie``: the group of commands about bookies, and the list of all bookies."""

import sys
from pathlib import Path

import click

from daemon.admin_session import AdminSession, run_in_session
from daemon.cli.bookies import BookieRow, bookie_rows, missed, with_losses
from daemon.cli.main import EXIT_FAILED, LazyGroup, config_option
from daemon.cli.orders import unreadable_texts
from daemon.cli.output import echo_list, list_output_option
from daemon.cli.progress import echo_notes
from daemon.status.leader import losses_due_ms
from daemon.words import counted
from ledgers.clock import Clock, SystemClock
from replication.orders import OrderStore

COMMANDS = {
    "drain": ("daemon.cli.drain:drain", "Move all copies of running bookies to others."),
    "maintenance": (
        "daemon.cli.maintenance:maintenance",
        "Let a bookie be absent for a while without copying.",
    ),
    "decommission": (
        "daemon.cli.decommission:decommission",
        "Remove a stopped bookie from the cluster for good.",
    ),
    "trust-identities": (
        "daemon.cli.identities:trust_identities",
        "Trust bookies whose cookies are newer than ledgers.",
    ),
}


@click.group(cls=LazyGroup, lazy=COMMANDS)
def bookie() -> None:
    """List, drain, maintain or decommission bookies.

    \b
    Take a bookie out of service while it runs:
      bookmender bookie drain ID --wait           move its copies to other bookies
      (stop the bookie)
      bookmender bookie decommission ID           delete its cookie
    Restart its host without any copying:
      bookmender bookie maintenance ID --for 30m
    """


@bookie.command("list")
@config_option
@list_output_option
@click.option("--space", is_flag=True, help="Also ask each bookie for its free disk space.")
def list_bookies(config: Path | None, output: str, space: bool) -> None:
    """List the bookies, their states and orders.

    \b
      writable   takes reads and writes
      read-only  takes reads only
      absent     not registered, but in maintenance or within the recovery delay
      lost       absent for longer than the recovery delay; its ledgers are copied

    Exit code 1: an order cannot be read. The message names it.
    """

    rows, unreadable = run_in_session(
        config, lambda cluster: gather_bookies(cluster, clock=SystemClock(), with_space=space)
    )
    now_ms = SystemClock().wall_ms()
    echo_list(
        output,
        {"bookies": [row.to_json() for row in rows], "unreadable_orders": [*unreadable]},
        rows="bookies",
        text=lambda: "\n".join(
            [*(row.to_text(now_ms=now_ms) for row in rows), counted(len(rows), "bookie")]
        ),
    )
    echo_notes(unreadable_texts(unreadable))
    sys.exit(EXIT_FAILED if unreadable else 0)


async def gather_bookies(
    cluster: AdminSession, *, clock: Clock, with_space: bool = False
) -> tuple[list[BookieRow], tuple[str, ...]]:
    """Return the rows of all known bookies, and the paths of unreadable orders.

    Raises UnavailableError.
    """
    orders = await OrderStore(cluster.store, cluster.paths).read()
    rows = await bookie_rows(cluster, orders, clock=clock, with_space=with_space)
    due_ms = await losses_due_ms(cluster, missed(rows), clock=clock)
    return with_losses(rows, due_ms), orders.unreadable
