"""``bookmender limits``: shows, changes and withdraws the limits on repair traffic."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from daemon.admin_session import AdminSession, order_event, run_in_session
from daemon.cli.main import EXIT_FAILED, config_option, output_option
from daemon.cli.option_types import Limit
from daemon.cli.orders import unreadable_texts
from daemon.cli.progress import echo_notes
from daemon.limits import limits_in_force, ordered_limits
from daemon.settings import Settings
from ledgers.errors import CorruptionError
from replication.orders import LimitsOrder, OrderStore, limits_znode

EXPLAINED: Mapping[str, str] = {
    "bytes_per_s": "stored bytes that each node copies per second",
    "entries_per_s": "entries that each node copies per second",
    "reads_in_flight_per_bookie": "reads that each node has in flight at one bookie",
    "requests_per_s": "requests that each role of a node sends to ZooKeeper per second",
    "yields_to_writers": "slower at bookies with active clients, full speed at others",
}
LOWEST_SENSIBLE: Mapping[str, int] = {"bytes_per_s": 2**20, "entries_per_s": 10}
"""Values below these are probably a mistake, such as a wrong unit."""


@click.command()
@config_option
@output_option
@click.option("--bytes-per-s", type=Limit("bytes_per_s"), help="Copied bytes. 0: no limit.")
@click.option("--entries-per-s", type=Limit("entries_per_s"), help="Copied entries. 0: no limit.")
@click.option(
    "--reads-in-flight",
    type=Limit("reads_in_flight_per_bookie"),
    help="Reads in flight for each bookie.",
)
@click.option(
    "--requests-per-s", type=Limit("requests_per_s"), help="Requests to ZooKeeper. 0: no limit."
)
@click.option(
    "--full-speed",
    is_flag=True,
    help="Do not yield to clients.",
)
@click.option("--gentle", is_flag=True, help="Yield where clients are active (default).")
@click.option("--reset", is_flag=True, help="Withdraw all ordered limits first.")
def limits(
    config: Path | None,
    output: str,
    bytes_per_s: int | None,
    entries_per_s: int | None,
    reads_in_flight: int | None,
    requests_per_s: int | None,
    full_speed: bool,
    gentle: bool,
    reset: bool,
) -> None:
    """Show or change the limits of all nodes.

    \b
      bookmender limits                      show them
      bookmender limits --bytes-per-s 50M    change one, on all nodes at once
      bookmender limits --reset              use each node's own settings again

    The limits override the settings of the nodes. Each number applies to one node: ten nodes copy
    ten times as much. Without an order, this host's settings are shown; other nodes may differ.

    Exit code 1: the order cannot be read. Nodes then keep the limits they had.
    """
    if full_speed and gentle:
        raise click.UsageError("Give --full-speed or --gentle, not both.")
    wanted = LimitsOrder(
        bytes_per_s=bytes_per_s,
        entries_per_s=entries_per_s,
        reads_in_flight_per_bookie=reads_in_flight,
        requests_per_s=requests_per_s,
        yields_to_writers=gentle if full_speed or gentle else None,
    )
    found, is_unreadable = run_in_session(
        config, lambda cluster: _change_or_read(cluster, wanted, reset=reset)
    )
    echo_notes(concerns(found))
    if output == "json":
        record = {each.key: {"value": each.value, "is_ordered": each.is_ordered} for each in found}
        click.echo(json.dumps(record, indent=2))
    else:
        for each in found:
            click.echo(each.to_text())
    sys.exit(EXIT_FAILED if is_unreadable else 0)


async def _change_or_read(
    cluster: AdminSession, wanted: LimitsOrder, *, reset: bool
) -> tuple[list["EffectiveLimit"], bool]:
    """Change the limits if asked to. Return the limits in force, and True if an order is
    unreadable."""
    if reset or wanted != LimitsOrder():
        order = await change_limits(cluster, wanted, reset=reset)
        return effective_limits(order, cluster.settings), False
    path = limits_znode(cluster.paths).path
    orders = await OrderStore(cluster.store, cluster.paths).read()
    is_unreadable = path in orders.unreadable
    if is_unreadable:
        echo_notes(unreadable_texts([path]))
    return effective_limits(orders.limits, cluster.settings), is_unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveLimit:
    """One limit in force. ``is_ordered``: True if an order sets it for all nodes; else it comes
    from this host's settings."""

    key: str
    value: int | bool
    is_ordered: bool

    def to_text(self) -> str:
        if isinstance(self.value, bool):
            value = "yes" if self.value else "no"
        else:
            value = f"{self.value:,}" if self.value else "no limit"
        by = "by order" if self.is_ordered else "by this host's settings"
        return f"{self.key:<27} {value:<12} {by:<24} {EXPLAINED[self.key]}"


async def change_limits(cluster: AdminSession, wanted: LimitsOrder, *, reset: bool) -> LimitsOrder:
    """Write an order with the wanted limits, and return it. Raises ConflictError, CorruptionError.

    Limits of the present order that ``wanted`` does not name stay; with ``reset`` they are removed.
    """
    order_store, znode = OrderStore(cluster.store, cluster.paths), limits_znode(cluster.paths)
    stored = await order_store.stored(znode)
    if stored is not None and stored.value is None and not reset:
        raise CorruptionError(
            "the ordered limits cannot be read. Withdraw them first: bookmender limits --reset"
        )
    before = LimitsOrder() if reset or stored is None else stored.value or LimitsOrder()
    limits = merged(before, wanted)
    if limits != LimitsOrder():
        await order_store.give(znode, limits, over=stored)
        ordered = {key: int(value) for key, value in ordered_limits(limits).items()}
        await cluster.note_order(order_event("limits", counts=ordered))
    elif stored is not None:
        await order_store.withdraw(znode, over=stored)
        await cluster.note_order(order_event("limits --reset"))
    return limits


def merged(before: LimitsOrder, wanted: LimitsOrder) -> LimitsOrder:
    """Return ``before`` with the wanted limits changed."""
    return replace(before, **ordered_limits(wanted))


def concerns(limits: Sequence[EffectiveLimit]) -> list[str]:
    """Return warnings about limits so low that repairs make no progress."""
    return [
        f"{each.key} is {each.value:,}. Below {LOWEST_SENSIBLE[each.key]:,} repairs take very "
        "long, and ledgers lack copies meanwhile. Give the value none for no limit."
        for each in limits
        if 0 < each.value < LOWEST_SENSIBLE.get(each.key, 0)
    ]


def effective_limits(order: LimitsOrder, settings: Settings) -> list[EffectiveLimit]:
    """Return the limits of a node with these settings, and where each comes from."""
    ordered = ordered_limits(order)
    return [
        EffectiveLimit(key=key, value=value, is_ordered=key in ordered)
        for key, value in asdict(limits_in_force(order, settings)).items()
    ]
