"""``bookmender bookie decommission``."""

import json
from pathlib import Path

import click

from daemon.cli import config_option, output_option
from daemon.operating.bookie_ids import BookieArgument, known_bookies
from daemon.operating.decommission import Decommissioned, decommission_bookie
from daemon.operating.progress import (
    NODES_GO_ON,
    ProgressLine,
    counted,
    saying_when_interrupted,
    tell,
)
from daemon.visit import Visit, run_visit
from ledgers.clock import SystemClock
from ledgers.metadata import BookieId


@click.command()
@click.argument("bookie", metavar="ID", type=BookieArgument())
@click.option("--ignore-unknown", is_flag=True, help="An id that nothing names is no error.")
@click.option(
    "--ignore-unreadable",
    is_flag=True,
    help="Go on though ledgers that cannot be read may name it: what they have there only, is lost with it.",
)
@config_option
@output_option
def decommission(
    bookie: BookieId,
    ignore_unknown: bool,
    ignore_unreadable: bool,
    config: Path | None,
    output: str,
) -> None:
    """Take a stopped bookie out of the cluster: once no ledger names it, its cookie goes.

    Asks the auditors to handle it as lost at once (and with it every other bookie that is away,
    whatever the recovery delay), and waits until every ledger has its copies elsewhere: a walk of
    its own over all metadata is the proof. A running bookie is refused, unless it is read-only,
    drained and empty.

    It may be interrupted at any moment and started again: Ctrl-C stops the waiting, not the repair.
    Exits 0 when nothing of the bookie is left, 1 when something must be done first (all ledgers
    that are left wait for help: it says which and why, and ends), 2 when nothing ever spoke of it:
    no cookie, ledger, mark or order (a wrong id, or it is decommissioned already; a script that may
    run twice wants --ignore-unknown), 3 when it could not tell: the metadata of some ledgers, which
    it names, cannot be read, and nothing proves that they name other bookies only. Its cookie stays
    then.
    """

    async def act(cluster: Visit) -> Decommissioned:
        if bookie not in await known_bookies(cluster):  # a ledger may name it still
            tell([unknown_text(bookie)])
        line = ProgressLine("ledger")

        def say(text: str) -> None:
            line.close()
            tell([text])

        try:
            return await decommission_bookie(
                cluster,
                bookie,
                ignores_unreadable=ignore_unreadable,
                tell=say,
                show=line.show,
                clock=SystemClock(),
            )
        finally:
            line.close()

    stays = (
        f"what was marked stays marked: {NODES_GO_ON}; and the cookie of {bookie} stays until the same "
        "command is run to its end"
    )
    with saying_when_interrupted(stays):
        done = run_visit(config, act)
    if not (done.was_known or ignore_unknown):
        raise click.UsageError(
            "nothing names it: it is decommissioned already, or no bookie of this cluster"
        )
    if output == "json":
        record = {
            "bookie_id": bookie,
            "ledgers_moved": done.moved_count,
            "cookie_deleted": done.had_cookie,
            "unreadable_ignored": list(done.ignored),
        }
        click.echo(json.dumps(record, indent=2))
        return
    cookie = "its cookie is deleted" if done.had_cookie else "it has no cookie"
    but = (
        f" but for {counted(len(done.ignored), 'ledger')} that cannot be read"
        if done.ignored
        else ""
    )
    click.echo(f"{bookie}: no ledger names it{but}, {cookie}")


def unknown_text(bookie: BookieId) -> str:
    """Without ids that resemble it, as elsewhere: what is taken out by mistake is gone."""
    return f"the cluster knows no bookie {bookie} (any more); bookmender bookie list shows those that it knows"
