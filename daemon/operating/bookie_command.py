"""``bookmender bookie``."""

import json
from pathlib import Path

import click

from daemon.cli import config_option, output_option
from daemon.operating.bookies import gather_bookies
from daemon.operating.decommission_command import decommission
from daemon.operating.drain_command import drain
from daemon.operating.maintenance_command import maintenance
from daemon.visit import run_visit
from ledgers.clock import SystemClock


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
    """Every bookie the cluster knows: writable, read-only or away, and what is ordered of it."""

    rows = run_visit(
        config, lambda cluster: gather_bookies(cluster, clock=SystemClock(), with_room=room)
    )
    if output == "json":
        click.echo(json.dumps({"bookies": [row.to_json() for row in rows]}, indent=2))
        return
    for row in rows:
        click.echo(row.to_text(now_ms=SystemClock().wall_ms()))
    click.echo(f"{len(rows)} bookies")


bookie.add_command(drain)
bookie.add_command(maintenance)
bookie.add_command(decommission)
