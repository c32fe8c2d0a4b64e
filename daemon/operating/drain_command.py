"""``bookmender bookie drain``."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from daemon.cli import EXIT_FAILED, EXIT_UNKNOWN, config_option, output_option
from daemon.operating.away_drains import away_concerns
from daemon.operating.bookie_ids import BookieArgument, known_bookies, require_known
from daemon.operating.drains import (
    Drains,
    cancel_drains,
    concerns,
    concerns_of_bookies,
    order_drains,
    read_drains,
    wait_drained,
)
from daemon.operating.progress import NODES_GO_ON, ProgressLine, saying_when_interrupted, tell
from daemon.operating.unreadable_orders import unreadable_texts
from daemon.visit import Visit, run_visit
from ledgers.clock import SystemClock
from ledgers.errors import RejectedError
from ledgers.metadata import BookieId


@click.command()
@click.argument("bookies", metavar="[ID]...", type=BookieArgument(), nargs=-1)
@config_option
@output_option
@click.option(
    "--fence-open/--leave-open",
    default=None,
    help="Whether open ledgers on it are recovered and closed, or left until their writers close them. "
    "Not said: as the order stands; a new one leaves them.",
)
@click.option("--wait", is_flag=True, help="Until no ledger names it. Ctrl-C leaves the order.")
@click.option("--cancel", is_flag=True, help="Take the order back. What has moved stays moved.")
@click.option("--yes", is_flag=True, help="Order it though the bookie is away.")
def drain(
    bookies: tuple[BookieId, ...],
    config: Path | None,
    output: str,
    fence_open: bool | None,
    wait: bool,
    cancel: bool,
    yes: bool,
) -> None:
    """Move all that a bookie holds to others, while it serves; several at once are no more work.

    Without an ID, and after --cancel: how far those are that are being drained. The bookie should
    be read-only, else new ledgers are put on it meanwhile; the order stands until --cancel, or
    until it is decommissioned.

    Of a bookie that is away (not registered) nothing can be read, and its ledgers are copied when
    it counts as lost, drained or not. A drain of one is refused (exit 1) without --yes, and says
    so.

    Exits 0 when nothing is left to move (or, without --wait, when the order is given), 1 when
    something is (with --wait: all that is left waits for help: it says which and why, and ends), or
    an order cannot be read, 2 for a bookie that the cluster does not know, 3 when nothing else is
    left but ledgers that cannot be read and may name it: bookie decommission --ignore-unreadable
    goes on without those.
    """
    if cancel and (wait or fence_open is not None or yes):
        raise click.UsageError("--cancel goes with no other option")
    if (cancel or wait or fence_open is not None or yes) and not bookies:
        raise click.UsageError("which bookie?")

    async def act(cluster: Visit) -> Drains:
        if not bookies:
            return await read_drains(cluster)
        require_known(bookies, await known_bookies(cluster))
        if cancel:
            cancelled = await cancel_drains(cluster, bookies)
            tell(
                f"{b} is not drained any more: what has moved stays moved"
                if b in cancelled
                else f"{b} was not being drained"
                for b in bookies
            )
            return await read_drains(cluster)
        tell(await _away(cluster, bookies, is_sure=yes))
        await order_drains(cluster, bookies, may_fence=fence_open, clock=SystemClock())
        if not wait:
            tell(await concerns(cluster, bookies))
            return (await read_drains(cluster)).only(bookies)
        tell(await concerns_of_bookies(cluster, bookies))
        line = ProgressLine("ledger")

        def say(text: str) -> None:
            line.close()
            tell([text])

        try:
            return await wait_drained(
                cluster, bookies, tell=say, show=line.show, clock=SystemClock()
            )
        finally:
            line.close()

    with saying_when_interrupted(_what_stays(bookies, is_ordered=wait)):
        drains = run_visit(config, act)
    tell(unreadable_texts(drains.orders.unreadable))
    click.echo(json.dumps(drains.to_json(), indent=2) if output == "json" else drains.to_text())
    if wait or not bookies:
        sys.exit(_exit_code(drains, bookies or tuple(drains.orders.draining)))


async def _away(cluster: Visit, bookies: Sequence[BookieId], *, is_sure: bool) -> list[str]:
    """What comes of draining those that are away. Raises RejectedError unless each drain stands
    already, or the operator ``is_sure``."""
    told = await away_concerns(cluster, bookies, clock=SystemClock())
    if not told or is_sure:
        return [*told.values()]
    standing = (await read_drains(cluster)).orders.draining
    if refused := [text for bookie, text in told.items() if bookie not in standing]:
        raise RejectedError(
            f"{'; '.join(refused)}; nothing was ordered: --yes orders it all the same"
        )
    return [*told.values()]


def _what_stays(bookies: Sequence[BookieId], *, is_ordered: bool) -> str:
    if not is_ordered:
        return "bookmender bookie drain says what is ordered"
    return (
        f"if the order was given it stands, and {NODES_GO_ON}: bookmender bookie drain says how far that is, "
        f"bookmender bookie drain {' '.join(bookies)} --cancel takes it back"
    )


def _exit_code(drains: Drains, bookies: Sequence[BookieId]) -> int:
    if drains.orders.unreadable:
        return EXIT_FAILED
    if drains.are_drained(bookies):
        return 0
    return EXIT_UNKNOWN if drains.are_drained_or_in_doubt(bookies) else EXIT_FAILED
