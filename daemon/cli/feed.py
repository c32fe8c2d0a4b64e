"""``bookmender feed``: the feed of all changes of ledgers, and its clients.

While the feed is enabled, the leader writes every change of ledger metadata to ledgers of its own.
``daemon.operations.feed`` does the work.
"""

import sys
from pathlib import Path

import click

from checkpoints.client import IN_ZOOKEEPER
from daemon.admin_session import AdminSession, shared_clock
from daemon.cli.main import EXIT_FAILED, CommandGroup, cluster_options
from daemon.cli.option_types import Duration
from daemon.cli.output import echo, echo_list, list_options
from daemon.cli.session import run_in_session
from daemon.operations.feed import (
    Failures,
    FeedFollowers,
    FeedSwitched,
    Forgotten,
    disable_feed,
    enable_feed,
    forget_client,
    read_clients,
    read_failures,
    read_feed,
)
from daemon.words import counted, duration_text, printable
from ledgers.clock import SystemClock

COMMANDS = {
    "follow": ("daemon.cli.feed_follow:follow_command", "Print changed ledgers, or run a command."),
}


@click.group(cls=CommandGroup, lazy=COMMANDS)
def feed() -> None:
    """Follow every change of ledger metadata.

    \b
      bookmender feed enable                  let the leader write all changes
      bookmender feed status                  show whether it does so, and the clients
      bookmender feed follow --client NAME    print each changed ledger
      bookmender feed clients                 show how far the clients are behind
      bookmender feed disable                 end the feed, and delete it

    The leader writes each change to ledgers in BookKeeper, on up to three bookies. So programs
    learn which ledgers changed, without listing all of them. Its failures never delay a repair.
    """


@feed.command()
@cluster_options
def status(config: Path | None, output: str) -> None:
    """Show the state and the clients of the feed.

    For clients with receipts in a database: bookmender feed clients --store URL.

    Exit codes: 0 it can be read, or it is disabled. 1 it cannot be read.
    """
    state = run_in_session(config, read_feed)
    now_ms = SystemClock().wall_ms()
    echo(output, state, state.to_text(now_ms=now_ms))
    sys.exit(EXIT_FAILED if state.error else 0)


@feed.command()
@cluster_options
@click.option(
    "--retention",
    "retention_s",
    type=Duration(),
    help="How long changes are kept, up to 30d.  [default: unchanged; 7d for a new feed]",
)
def enable(config: Path | None, output: str, retention_s: int | None) -> None:
    """Enable the feed, or change its retention.

    The first checkpoints of a new feed contain all ledgers that exist.
    """

    async def act(cluster: AdminSession) -> tuple[FeedSwitched, int]:
        clock = await shared_clock(cluster)
        return await enable_feed(cluster, retention_s=retention_s, clock=clock)

    done, kept_s = run_in_session(config, act)
    already = "" if done.has_changed else "already "
    text = f"The feed is {already}enabled. It keeps changes for {duration_text(kept_s)}."
    if done.has_changed:
        text += "\nFollow it: bookmender feed follow --client NAME --from-start"
    echo(output, done, text)


@feed.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@cluster_options
def disable(yes: bool, config: Path | None, output: str) -> None:
    """Disable the feed, and delete its ledgers.

    The leader deletes them. After the next bookmender feed enable, each client gets all ledgers
    again. It is not told which ledgers were deleted in the meantime.
    """
    confirm_deletion("the feed, whose clients must then begin again", yes=yes)

    async def act(cluster: AdminSession) -> FeedSwitched:
        return await disable_feed(cluster, clock=await shared_clock(cluster))

    done = run_in_session(config, act)
    text = f"The feed is {'' if done.has_changed else 'already '}disabled."
    echo(output, done, text)


# --- Clients --------------------------------------------------------------------------------------

client_store_option = click.option(
    "--store",
    default=IN_ZOOKEEPER,
    show_default=True,
    envvar="FEED_STORE",  # a password in a URL must not be in the list of processes
    show_envvar=True,
    metavar="URL",
    help="Where receipts are: zookeeper:, sqlite:///FILE or postgresql://…",
)


@feed.command()
@click.argument("name", required=False)
@click.option("--retry", is_flag=True, help="Let the client NAME try its failures again.")
@click.option("--forget", is_flag=True, help="Delete the receipts and failures of the client NAME.")
@click.option("--yes", is_flag=True, help="With --forget: do not ask.")
@click.option("--dry-run", is_flag=True, help="With --forget: only show what would be deleted.")
@client_store_option
@list_options
def clients(
    name: str | None,
    retry: bool,
    forget: bool,
    yes: bool,
    dry_run: bool,
    store: str,
    config: Path | None,
    output: str,
) -> None:
    """Show the clients and their failures.

    \b
      bookmender feed clients                how far each client is behind
      bookmender feed clients NAME           which ledgers this client could not handle, and why
      bookmender feed clients NAME --retry   let it try them again

    With --retry, bookmender feed follow tries them again: within some seconds if it runs, else at
    its next start. After --forget, a client that runs under this name ends with an error. One that
    starts later is new.

    Exit codes: 0 neither failures nor lost changes, or done. 1 a client has failures, or the feed
    has deleted changes that the client was not given. 2 no such client.
    """
    if name is None and (retry or forget):
        raise click.UsageError("--retry and --forget need the NAME of a client.")
    if retry and forget:
        raise click.UsageError("--retry and --forget exclude each other.")
    if name is None:
        found = run_in_session(config, lambda cluster: read_clients(cluster, store))
        echo_list(output, found, rows="clients", text=lambda: _list_text(found))
        is_bad = any(each.failure_count or each.has_lost_changes for each in found.clients)
        sys.exit(EXIT_FAILED if is_bad else 0)
    failures = run_in_session(
        config, lambda cluster: read_failures(cluster, store, name, orders_retry=retry)
    )
    if failures is None:
        raise click.UsageError(
            f"The store has no client '{printable(name)}'. List its clients: bookmender feed "
            "clients. Clients with receipts in a database need --store."
        )
    if not forget:
        text = _failures_text(failures, is_retried=retry)
        echo(output, failures, text)
        sys.exit(EXIT_FAILED if failures.failures and not retry else 0)
    what = f"client {printable(name)} with {counted(len(failures.failures), 'failure')}"
    if not dry_run:
        confirm_deletion(what, yes=yes)
    is_deleted = not dry_run and run_in_session(
        config, lambda cluster: forget_client(cluster, store, name)
    )
    text = f"Would delete {what}." if dry_run else f"Deleted {what}."
    answer = Forgotten(name=name, is_deleted=is_deleted)
    echo(output, answer, text)


def _list_text(found: FeedFollowers) -> str:
    lines = [each.to_text() for each in found.clients]
    lines += [
        f"Client {printable(name)}: connected, its receipts are in another store (--store)."
        for name in found.connected_elsewhere
    ]
    return "\n".join([*lines, counted(len(lines), "client")])


def _failures_text(found: Failures, *, is_retried: bool) -> str:
    now_ms, lines = SystemClock().wall_ms(), []
    for each in found.failures:
        age = duration_text((now_ms - each.time_ms) / 1000)
        retried = ", to be tried again" if each.is_retry_ordered else ""
        lines.append(f"ledger {each.ledger_id}, {age} ago{retried}: {printable(each.because)}")
    if is_retried:
        lines.append(f"{counted(found.retried_count, 'ledger')} will be tried again.")
    elif found.failures:
        lines.append(f"{counted(len(found.failures), 'failure')}. Try again: --retry")
    else:
        lines.append("0 failures")
    return "\n".join(lines)


def confirm_deletion(text: str, *, yes: bool) -> None:
    """Ask whether to delete something. Without a terminal it is an error, unless ``yes`` is
    given."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"This deletes {text}. Give --yes to do it.")
    click.confirm(f"Delete {text}?", abort=True, err=True)
