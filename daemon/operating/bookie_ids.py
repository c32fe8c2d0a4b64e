"""Which bookie an argument means: one that the cluster knows, or a question back."""

import asyncio
import difflib
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from auditor.records import read_absences
from daemon.operating.unreadable_orders import bookies_of
from daemon.settings import load_settings
from daemon.visit import Visit, log_errors_only, visit
from ledgers.errors import BookmenderError, CorruptionError, UnavailableError
from ledgers.formats.bookie_info import parse_bookie_id
from ledgers.metadata import BookieId
from ledgers.registration import BookieView
from replication.cluster.order_book import OrderBook

COMPLETION_TIMEOUT_S = 2.0
"""A shell that waits longer for its completions is a nuisance."""


class BookieArgument(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A bookie id, completed from the cluster that the settings name."""

    name = "bookie id"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> BookieId:
        try:
            return parse_bookie_id(value)
        except CorruptionError:
            self.fail(f"{value!r} cannot be a bookie's id, as in 10.0.0.1:3181", param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        try:
            bookies = _completions(ctx.params.get("config"))
        except (BookmenderError, OSError, TimeoutError):
            return []
        return [CompletionItem(b) for b in sorted(bookies) if b.startswith(incomplete)]


def _completions(config: Path | None) -> Collection[BookieId]:
    settings = load_settings(config, os.environ)
    log_errors_only(settings)  # elsewhere than among the completions

    async def look() -> Collection[BookieId]:
        async with asyncio.timeout(COMPLETION_TIMEOUT_S), visit(settings) as cluster:
            return await known_bookies(cluster)

    return asyncio.run(look())


async def known_bookies(cluster: Visit) -> frozenset[BookieId]:
    """Registered now, ever set up, named by an order, or by a ledger, as a leader of ours has
    told."""
    orders = await OrderBook(cluster.store, cluster.ur).read()
    naming = (await read_absences(cluster.store, cluster.ur)).naming
    return frozenset(
        (
            *(bookie for bookie, count in naming.items() if count),
            *(await registered_bookies(cluster)).available,
            *await cluster.registration.cookies(),
            *orders.draining,
            *orders.maintenance,
            *bookies_of(orders.unreadable),
        )
    )


async def registered_bookies(cluster: Visit) -> BookieView:
    """None at all where the daemon would not believe it (rule S8): a person may know better."""
    try:
        return await cluster.registration.read()
    except UnavailableError:
        return BookieView()


def require_known(wanted: Sequence[BookieId], known: Collection[BookieId]) -> None:
    """Raises UsageError for the first that the cluster does not know."""
    for bookie in wanted:
        if bookie not in known:
            raise click.UsageError(f"the cluster knows no bookie {bookie}{hint(bookie, known)}")


def hint(wrong: BookieId, known: Collection[BookieId]) -> str:
    """What may have been meant."""
    close = difflib.get_close_matches(wrong, sorted(known), n=3)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    if not known:
        return "; it knows none at all"
    return "; bookmender bookie list shows those that it knows"
