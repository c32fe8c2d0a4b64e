"""``bookmender feed clients``, ``failures`` and ``forget``: the clients of the feed.

The lag of a client is found in the log: how many checkpoints follow its low watermark, and how old
the first of them is. Nothing here fences a client.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from checkpoints.chain import NO_FEED, FeedChain, read_chain
from checkpoints.client import (
    IN_ZOOKEEPER,
    ClusterConnection,
    connected_names,
    open_client_table,
)
from checkpoints.feed_ledgers import FeedLedgers
from checkpoints.model import CheckpointId, ledger_id_of
from checkpoints.receipts import ClientSummary, ClientTable, Failure
from daemon.admin_session import AdminSession, order_event, run_in_session
from daemon.cli.main import EXIT_FAILED, config_option, output_option
from daemon.cli.output import echo_list, list_output_option
from daemon.words import counted, duration_text, printable
from ledgers.bookie_auth import bookie_connector
from ledgers.client import open_bookies
from ledgers.clock import SystemClock
from replication.cluster import ViewSource
from replication.orders import OrderStore

T = TypeVar("T")

READS_IN_FLIGHT_MAX: Final = 8
LAG_CHECKPOINTS_MAX: Final = 10_000
"""Checkpoints that are read to find lags. A client further behind has at least this lag."""
COLUMNS = ("name", "is_connected", "lag_checkpoints", "lag_s", "failure_count", "low_watermark")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How far a client is behind. ``seconds``: age of the first checkpoint that lacks a receipt.
    ``is_more``: the lag is at least this. ``is_lost``: retention has deleted changes that the
    client was not given."""

    checkpoints: int
    seconds: float
    is_more: bool = False
    is_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRow:
    """A client of the feed. ``lag``: None if it is unknown: the client is new, is of an earlier
    feed, or the feed is disabled."""

    summary: ClientSummary
    is_connected: bool
    is_current: bool
    """Its receipts are of the present feed."""
    lag: Lag | None

    def to_json(self) -> dict[str, Any]:
        summary, lag = self.summary, self.lag
        return {
            "name": summary.name,
            "is_connected": self.is_connected,
            "is_current": self.is_current,
            "low_watermark": summary.low_watermark,
            "lag_checkpoints": None if lag is None else lag.checkpoints,
            "lag_s": None if lag is None else round(lag.seconds, 3),
            "is_lag_more": lag is not None and lag.is_more,
            "has_lost_changes": lag is not None and lag.is_lost,
            "receipt_count": summary.receipt_count,
            "failure_count": len(summary.failures),
        }

    def to_text(self) -> str:
        state = "connected" if self.is_connected else "not connected"
        parts = [state, self._lag_text()]
        if self.summary.failures:
            parts.append(counted(len(self.summary.failures), "failure"))
        return f"Client {printable(self.summary.name)}: {', '.join(parts)}."

    def _lag_text(self) -> str:
        lag = self.lag
        if self.summary.low_watermark is None:
            return "no receipt yet"
        if not self.is_current:
            return "its receipts are of an earlier feed"
        if lag is None:
            return "lag unknown"
        if lag.is_lost:
            return "the log has lost changes that it was not given"
        if not lag.checkpoints:
            return "up to date"
        more = "more than " if lag.is_more else ""
        behind = counted(lag.checkpoints, "checkpoint")
        return f"{more}{behind} behind ({duration_text(lag.seconds)})"


def lag_of(
    low_watermark: CheckpointId,
    checkpoints: Sequence[tuple[CheckpointId, int]],
    *,
    oldest_previous_id: CheckpointId,
    is_complete: bool,
    now_ms: int,
) -> Lag:
    """Return the lag of a client.

    ``checkpoints``: ids and times of the latest checkpoints, ascending. ``oldest_previous_id``: of
    the log. ``is_complete``: False if the log has earlier checkpoints.
    """
    first = bisect_right(checkpoints, low_watermark, key=lambda each: each[0])
    count = len(checkpoints) - first
    seconds = max(0.0, (now_ms - checkpoints[first][1]) / 1000) if count else 0.0
    return Lag(
        checkpoints=count,
        seconds=seconds,
        is_more=first == 0 and not is_complete,
        is_lost=low_watermark < oldest_previous_id,
    )


async def read_clients(cluster: AdminSession, store: str) -> Sequence[ClientRow]:
    """Return all clients of a store, by name. Raises UnavailableError, CorruptionError,
    SettingsError."""
    connection = connection_of(cluster)
    table = await open_client_table(store, connection)
    try:
        summaries = await table.list()
    finally:
        await table.close()
    connected = await connected_names(connection)
    stored = await read_chain(cluster.store, cluster.paths)
    if stored.error is not None:
        raise stored.error
    chain = stored.value or NO_FEED
    current = {each.name for each in summaries if each.generation == chain.generation}
    watermarks = [
        each.low_watermark
        for each in summaries
        if each.name in current and each.low_watermark is not None
    ]
    lags = await _read_lags(cluster, chain, watermarks) if watermarks and chain.logs else {}
    return [
        ClientRow(
            summary=each,
            is_connected=each.name in connected,
            is_current=each.name in current,
            lag=None
            if each.low_watermark is None or each.name not in current
            else lags.get(each.low_watermark),
        )
        for each in summaries
    ]


async def _read_lags(
    cluster: AdminSession, chain: FeedChain, watermarks: Sequence[CheckpointId]
) -> dict[CheckpointId, Lag]:
    """Return the lag for each watermark."""
    found: list[tuple[CheckpointId, int]] = []
    is_complete = True
    lowest = min(watermarks)
    async with opened_feed(cluster) as ledgers, aclosing(_backwards(chain, ledgers)) as checkpoints:
        async for checkpoint_id, time_ms in checkpoints:
            if checkpoint_id <= lowest:
                break
            if len(found) == LAG_CHECKPOINTS_MAX:
                is_complete = False
                break
            found.append((checkpoint_id, time_ms))
    now_ms = SystemClock().wall_ms()
    found.reverse()
    return {
        each: lag_of(
            each,
            found,
            oldest_previous_id=chain.logs[0].previous_id,
            is_complete=is_complete,
            now_ms=now_ms,
        )
        for each in watermarks
    }


async def _backwards(
    chain: FeedChain, ledgers: FeedLedgers
) -> AsyncGenerator[tuple[CheckpointId, int], None]:
    """Yield id and time of each checkpoint in the log, latest first."""
    for segment in reversed(chain.logs):
        opened = await ledgers.open(segment.ledger_id)
        if opened is None:
            continue  # the leader is about to create it, or retention has deleted it
        async with aclosing(ledgers.checkpoints_backwards(opened)) as checkpoints:
            async for _, checkpoint in checkpoints:
                yield checkpoint.id, checkpoint.time_ms


@asynccontextmanager
async def opened_feed(cluster: AdminSession) -> AsyncIterator[FeedLedgers]:
    """Connect to the bookies, to read the ledgers of the feed."""
    clock = SystemClock()
    views = ViewSource(cluster.registration, clock, OrderStore(cluster.store, cluster.paths))
    await views.refresh()
    async with open_bookies(
        views.resolve,
        reads_in_flight_max=READS_IN_FLIGHT_MAX,
        connector=bookie_connector(cluster.settings.security),
    ) as bookies:
        yield FeedLedgers(cluster.manager, bookies, clock)


def connection_of(cluster: AdminSession) -> ClusterConnection:
    """Return the session of a command as clients of the feed need it."""
    return ClusterConnection(
        store=cluster.store,
        manager=cluster.manager,
        root=cluster.root,
        security=cluster.settings.security,
    )


# --- The commands ---------------------------------------------------------------------------------

client_store_option = click.option(
    "--store",
    default=IN_ZOOKEEPER,
    show_default=True,
    envvar="FEED_STORE",  # a password in a URL must not be in the list of processes
    show_envvar=True,
    metavar="URL",
    help="Where receipts are: zookeeper:, sqlite:///FILE or postgresql://…",
)


@click.command()
@client_store_option
@config_option
@list_output_option
def clients(store: str, config: Path | None, output: str) -> None:
    """List the clients of the feed, and how far they are behind.

    Exit codes: 0 neither failures nor lost changes. 1 a client has failures, or the feed has
    deleted changes that the client was not given.
    """

    async def act(cluster: AdminSession) -> tuple[Sequence[ClientRow], list[str]]:
        rows = await read_clients(cluster, store)
        connected = await connected_names(connection_of(cluster))
        return rows, sorted(connected - {each.summary.name for each in rows})

    rows, elsewhere = run_in_session(config, act)
    echo_list(
        output,
        {"clients": [each.to_json() for each in rows], "connected_elsewhere": elsewhere},
        rows="clients",
        columns=COLUMNS,
        text=lambda: "\n".join(_list_lines(rows, elsewhere)),
    )
    is_bad = any(each.summary.failures or (each.lag and each.lag.is_lost) for each in rows)
    sys.exit(EXIT_FAILED if is_bad else 0)


def _list_lines(rows: Sequence[ClientRow], elsewhere: Sequence[str]) -> list[str]:
    lines = [each.to_text() for each in rows]
    lines += [
        f"Client {printable(name)}: connected, its receipts are in another store (--store)."
        for name in elsewhere
    ]
    return [*lines, counted(len(rows) + len(elsewhere), "client")]


@click.command()
@click.argument("name")
@click.option("--retry", is_flag=True, help="Let the client try all of them again.")
@client_store_option
@config_option
@output_option
def failures(name: str, retry: bool, store: str, config: Path | None, output: str) -> None:
    """Show the ledgers that a client could not handle, and why.

    With --retry, bookmender feed follow tries them again: within some seconds if it runs, else at
    its next start.

    Exit codes: 0 no failures, or they are tried again. 1 failures. 2 no such client.
    """

    async def act(table: ClientTable) -> tuple[ClientSummary | None, int]:
        ordered_count = await table.order_retries(name) if retry else 0
        return await table.find(name), ordered_count

    found, ordered_count = _run_in_table(config, store, act)
    if found is None:
        raise _unknown(name)
    if output == "json":
        rows = [failure_record(each) for each in found.failures]
        click.echo(json.dumps({"failures": rows, "retried_count": ordered_count}, indent=2))
    else:
        for each in found.failures:
            click.echo(_failure_text(each))
        if retry:
            click.echo(f"{counted(ordered_count, 'ledger')} will be tried again.")
        elif found.failures:
            click.echo(f"{counted(len(found.failures), 'failure')}. Try again: --retry")
        else:
            click.echo("0 failures")
    sys.exit(EXIT_FAILED if found.failures and not retry else 0)


@click.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@client_store_option
@config_option
@output_option
def forget(
    name: str, yes: bool, dry_run: bool, store: str, config: Path | None, output: str
) -> None:
    """Delete the receipts and failures of a client.

    A client that runs now under this name ends with an error. One that starts later is new.
    """

    async def find(table: ClientTable) -> ClientSummary | None:
        return await table.find(name)

    found = _run_in_table(config, store, find)
    if found is None:
        raise _unknown(name)
    text = f"client {printable(name)} with {counted(len(found.failures), 'failure')}"
    if not dry_run:
        confirm_deletion(text, yes=yes)
    is_deleted = not dry_run and _run_in_table(
        config, store, lambda table: table.delete(name), order="feed forget"
    )
    if output == "json":
        click.echo(json.dumps({"name": name, "is_deleted": is_deleted}, indent=2))
    elif dry_run:
        click.echo(f"Would delete {text}.")
    else:
        click.echo(f"Deleted {text}.")


def confirm_deletion(text: str, *, yes: bool) -> None:
    """Ask whether to delete something. Without a terminal it is an error, unless ``yes`` is
    given."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"This deletes {text}. Give --yes to do it.")
    click.confirm(f"Delete {text}?", abort=True, err=True)


def _run_in_table(
    config: Path | None,
    store: str,
    act: Callable[[ClientTable], Awaitable[T]],
    *,
    order: str = "",
) -> T:
    """Run a function on the clients of a store. ``order``: recorded in the history."""

    async def run(cluster: AdminSession) -> T:
        table = await open_client_table(store, connection_of(cluster))
        try:
            result = await act(table)
        finally:
            await table.close()
        if order:
            await cluster.note_order(order_event(order))
        return result

    return run_in_session(config, run)


def _unknown(name: str) -> click.ClickException:
    return click.UsageError(
        f"The store has no client '{printable(name)}'. List its clients: bookmender feed clients. "
        "Clients with receipts in a database need --store."
    )


def failure_record(failure: Failure) -> dict[str, Any]:
    return {
        "ledger_id": ledger_id_of(failure.key),
        "version": failure.version,
        "is_deleted": failure.is_deleted,
        "because": failure.because,
        "time_ms": failure.time_ms,
        "is_retry_ordered": failure.is_retry_ordered,
    }


def _failure_text(failure: Failure) -> str:
    age = duration_text((SystemClock().wall_ms() - failure.time_ms) / 1000)
    retried = ", to be tried again" if failure.is_retry_ordered else ""
    ledger_id = ledger_id_of(failure.key)
    return f"ledger {ledger_id}, {age} ago{retried}: {printable(failure.because)}"
