"""``bookmender bookie trust-identities``: shows, gives and withdraws trust in newer cookies."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from daemon.admin_session import AdminSession, order_event, run_in_session, shared_clock
from daemon.cli.bookies import BookieArgument, known_bookies, require_known
from daemon.cli.main import EXIT_FAILED, config_option, output_option
from daemon.words import counted
from ledgers.model import BookieId
from ledgers.registration import HIDDEN_CZXID
from replication.orders import IdentitiesOrder, OrderStore, identities_znode


@dataclass(frozen=True, slots=True, kw_only=True)
class Identities:
    """The bookies' cookies, and which of them are trusted.

    ``cookies``: the czxid of each bookie's present cookie. ``trusted``: the czxid that the order
    recorded for each bookie that it names.
    """

    cookies: Mapping[BookieId, int]
    trusted: Mapping[BookieId, int]
    has_changed: bool = False

    def is_trusted(self, bookie: BookieId) -> bool:
        return self.trusted.get(bookie) == self.cookies[bookie]

    def to_json(self) -> dict[str, Any]:
        return {
            "has_changed": self.has_changed,
            "bookies": {
                bookie: {"cookie_czxid": czxid, "is_trusted": self.is_trusted(bookie)}
                for bookie, czxid in sorted(self.cookies.items())
            },
        }

    def to_text(self) -> str:
        lines = [
            f"{bookie}: "
            f"{'trusted' if self.is_trusted(bookie) else 'judged by the age of its cookie'}"
            for bookie in sorted(self.cookies)
        ]
        return "\n".join(
            [*lines, counted(sum(map(self.is_trusted, self.cookies)), "trusted bookie")]
        )


@click.command("trust-identities")
@click.argument("bookies", metavar="[ID]...", type=BookieArgument(), nargs=-1)
@config_option
@output_option
@click.option("--all", "are_all", is_flag=True, help="Trust every bookie that has a cookie.")
@click.option("--withdraw", is_flag=True, help="Withdraw the order for all bookies.")
@click.option("--yes/--dry-run", help="Do it, or change nothing (default).")
def trust_identities(
    bookies: Sequence[BookieId],
    config: Path | None,
    output: str,
    are_all: bool,
    withdraw: bool,
    yes: bool,
) -> None:
    """Trust bookies whose cookies are newer than their ledgers.

    Such a bookie counts as reformatted, so its "no such entry" proves nothing. This is wrong after
    ZooKeeper's data was imported, or after bookie IDs changed. The order names the present cookies,
    so a later reformat is noticed.

    Use this only if no disk was erased. Trusting a bookie that lost its data can make a recovery
    cut off entries.

    Exit codes: 0 done, or shown. 1 not done because --yes is missing. 2 unknown bookie.
    """
    if withdraw and (bookies or are_all):
        raise click.UsageError("--withdraw withdraws the whole order. Do not name bookies.")
    if yes and not (bookies or are_all or withdraw):
        raise click.UsageError("Name bookies, or give --all.")

    async def act(cluster: AdminSession) -> Identities:
        require_known(bookies, await known_bookies(cluster))
        if withdraw and yes:
            await withdraw_trust(cluster)
        elif yes:
            await give_trust(cluster, None if are_all else bookies)
        return await read_identities(cluster, has_changed=yes)

    found = run_in_session(config, act)
    click.echo(json.dumps(found.to_json(), indent=2) if output == "json" else found.to_text())
    if (bookies or are_all or withdraw) and not yes:
        click.echo("Nothing was changed. To do it, give --yes.", err=True)
        sys.exit(EXIT_FAILED)


async def read_identities(cluster: AdminSession, *, has_changed: bool = False) -> Identities:
    """Read all cookies and the order. Raises UnavailableError."""
    orders = await OrderStore(cluster.store, cluster.paths).read()
    return Identities(
        cookies=await _cookies(cluster), trusted=orders.trusted_cookies, has_changed=has_changed
    )


async def give_trust(cluster: AdminSession, bookies: Sequence[BookieId] | None) -> None:
    """Trust the present cookies of these bookies, or of all if ``bookies`` is None.

    Bookies of an existing order stay trusted. Raises ConflictError.
    """
    order_store, znode = OrderStore(cluster.store, cluster.paths), identities_znode(cluster.paths)
    stored = await order_store.stored(znode)
    before = {} if stored is None or stored.value is None else stored.value.cookies
    cookies = await _cookies(cluster)
    added = cookies if bookies is None else {b: cookies[b] for b in bookies if b in cookies}
    clock = await shared_clock(cluster)
    trusted = IdentitiesOrder(since_ms=clock.wall_ms(), cookies={**before, **added})
    await order_store.give(znode, trusted, over=stored)
    await cluster.note_order(order_event("bookie trust-identities", bookies=tuple(sorted(added))))


async def withdraw_trust(cluster: AdminSession) -> None:
    """Withdraw the order, if there is one. Raises ConflictError."""
    order_store, znode = OrderStore(cluster.store, cluster.paths), identities_znode(cluster.paths)
    stored = await order_store.stored(znode)
    if stored is not None:
        await order_store.withdraw(znode, over=stored)
        await cluster.note_order(order_event("bookie trust-identities --withdraw"))


async def _cookies(cluster: AdminSession) -> dict[BookieId, int]:
    """Return the czxid of each cookie. Cookies that ACLs hide are left out: their age is
    unknown."""
    cookies = await cluster.registration.cookies()
    return {b: stat.czxid for b, stat in cookies.items() if stat.czxid != HIDDEN_CZXID}
