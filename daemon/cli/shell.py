"""``bookmender shell``: the recovery commands of ``bookkeeper shell``, with their names.

Runbooks written for Java's tool go on working. Each command calls the code of one of our own
commands, and prints what ``bookkeeper shell`` of 4.17 prints, without the prefix of its logger.
Options have one or two dashes, as Java's parser accepts both. ``tests/cluster/test_shell.py``
compares the output with that of Java's tool on the same cluster.
"""

import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from auditor.election import current_leader
from auditor.scan import READS_AT_ONCE, read_each
from daemon.admin_session import AdminSession
from daemon.cli.bookie import decommission_visibly
from daemon.cli.bookie import result_text as decommissioned_text
from daemon.cli.main import EXIT_FAILED, CommandGroup, LedgerId, config_option
from daemon.cli.option_types import BookieArgument
from daemon.cli.paths import ReadableFile
from daemon.cli.repair import repair_visibly, result_text
from daemon.cli.session import run_with, settings_for_command
from daemon.java_settings import metadata_uri, read_properties
from daemon.operations.bookies import known_bookies, require_known
from daemon.operations.checks import BOOKIES, force_check
from daemon.operations.orders import UNREADABLE_VOTE
from daemon.operations.switch import (
    is_enabled,
    read_recovery_delay,
    set_recovery_delay,
    switch_off,
    switch_on,
)
from daemon.settings import Settings
from daemon.words import printable
from ledgers.clock import SystemClock
from ledgers.errors import (
    RejectedError,
    SettingsError,
)
from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId
from replication.marks import (
    MarkedLedger,
    marked_ledger_ids,
    read_locks,
    read_marks,
)

Load = Callable[[], Settings]
"""Loads the settings that the options of the group name. Help needs none."""
F = TypeVar("F", bound=Callable[..., Any])


def _value(long: str, short: str = "", *, name: str = "", **kwargs: Any) -> Callable[[F], F]:
    """Return an option as Java's parser knows it: the long name may have one dash or two."""
    names = filter(None, (long, short, f"-{long}", name))
    return click.option(*names, **kwargs)


def _flag(long: str, short: str = "", *, name: str = "", **kwargs: Any) -> Callable[[F], F]:
    return _value(long, short, name=name, is_flag=True, **kwargs)


@click.group(cls=CommandGroup)
@config_option
@click.option(
    "-conf",
    "--conf",
    "java_config",
    type=ReadableFile(),
    help="Java's bk_server.conf: its cluster is used.",
)
@click.pass_context
def shell(ctx: click.Context, config: Path | None, java_config: Path | None) -> None:
    """Run recovery commands of bookkeeper shell.

    \b
      bookmender shell listunderreplicated -printmissingreplica
      bookmender shell -conf bk_server.conf whoisauditor

    They are for existing runbooks. Names, options and output are those of bookkeeper shell 4.17,
    without the prefix of its log lines. -c and -conf come before the command. Exit codes: 0 done, 1
    failed, 2 wrong usage, 3 unknown.
    """
    ctx.obj = partial(_load, config, java_config)  # not loaded yet: help needs no cluster


def _load(config: Path | None, java_config: Path | None) -> Settings:
    """Return the settings. Java's file replaces the address of the cluster."""
    environment = dict(os.environ)
    if java_config is not None:
        try:
            uri = metadata_uri(read_properties(java_config))
        except SettingsError as error:
            raise SettingsError(f"{java_config}: {error}") from error
        environment["BOOKMENDER_METADATA_SERVICE_URI"] = uri
    return settings_for_command(config, environment)


# --- The queue ------------------------------------------------------------------------------------


@shell.command()
@_value("-missingreplica", "-mr", type=BookieArgument(), help="Their marks name this bookie.")
@_value(
    "-excludingmissingreplica",
    "-emr",
    type=BookieArgument(),
    help="Their marks do not name this one.",
)
@_flag("-printmissingreplica", "-pmr", help="Print the missing bookies.")
@_flag("-printreplicationworkerid", "-prw", help="Print the worker.")
@_flag("-onlydisplayledgercount", "-c", help="Only count.")
@click.pass_obj
def listunderreplicated(
    load: Load,
    missingreplica: BookieId | None,
    excludingmissingreplica: BookieId | None,
    printmissingreplica: bool,
    printreplicationworkerid: bool,
    onlydisplayledgercount: bool,
) -> None:
    """List ledgers marked in the shared queue.

    Java lists them in random order, bookmender by ID. bookmender queue also shows the private
    queue, and why each ledger is marked.
    """

    async def look(cluster: AdminSession) -> tuple[list[MarkedLedger], dict[int, str]]:
        store, paths = cluster.store, cluster.paths
        marked = await read_marks(store, paths, await marked_ledger_ids(store, paths))
        named = {bookie for each in marked if each.mark for bookie in each.mark.replicas}
        wanted = [each for each in (missingreplica, excludingmissingreplica) if each]
        await _require_known(cluster, wanted, named=named)
        chosen = [
            each
            for each in marked
            if each.mark is None  # it may name any bookie
            or (
                (missingreplica is None or missingreplica in each.mark.replicas)
                and excludingmissingreplica not in each.mark.replicas
            )
        ]
        if not printreplicationworkerid:
            return chosen, {}
        locks = await read_locks(store, paths, [each.ledger_id for each in chosen])
        return chosen, {each.ledger_id: each.holder for each in locks if each.holder}

    chosen, holders = run_with(load(), look)
    for each in () if onlydisplayledgercount else chosen:
        click.echo(each.ledger_id)
        if each.mark is not None and each.mark.ctime_ms is not None:
            click.echo(f"\tCtime : {each.mark.ctime_ms}")
        for bookie in each.mark.replicas if each.mark and printmissingreplica else ():
            click.echo(f"\tMissingReplica : {printable(bookie)}")
        if each.ledger_id in holders:
            click.echo(f"\tReplicationWorkerId : {printable(holders[each.ledger_id])}")
    click.echo(f"Under replicated ledger count: {len(chosen)}")


async def _require_known(
    cluster: AdminSession, bookies: Sequence[BookieId], *, named: Collection[BookieId]
) -> None:
    """Raise UsageError for a bookie that is not in ``named`` and that the cluster does not know. An
    empty answer about a mistyped bookie would be mistaken for good news."""
    if not set(bookies) <= set(named):
        require_known(bookies, {*named, *await known_bookies(cluster)})


# --- The auditor ----------------------------------------------------------------------------------


@shell.command()
@click.pass_obj
def whoisauditor(load: Load) -> None:
    """Show the elected auditor."""
    leader = run_with(load(), lambda cluster: current_leader(cluster.store, cluster.paths))
    if leader is None:
        click.echo("No auditor elected")
        sys.exit(EXIT_FAILED)
    click.echo(f"Auditor: {printable(leader.candidate or f'unknown ({UNREADABLE_VOTE})')}")


@shell.command()
@_flag("-enable", "-e", help="Enable it.")
@_flag("-disable", "-d", help="Disable it.")
@click.pass_obj
def autorecovery(load: Load, enable: bool, disable: bool) -> None:
    """Enable, disable or show auto-recovery."""
    if enable and disable:
        raise click.UsageError("Give -enable or -disable, not both.")
    if not (enable or disable):
        is_on = run_with(load(), is_enabled)
        click.echo(f"Autorecovery is {'enabled' if is_on else 'disabled'}.")
        return
    state = "enabled" if enable else "disabled"
    if run_with(load(), switch_on if enable else switch_off).has_changed:
        click.echo(f"Autorecovery is {state}.")
    else:
        click.echo(f"Autorecovery already {state}. Doing nothing")


@shell.command()
@click.pass_obj
def triggeraudit(load: Load) -> None:
    """Treat all absent bookies as lost now."""
    run_with(load(), lambda cluster: force_check(cluster, BOOKIES))


@shell.command()
@_flag("-get", "-g", name="shows", help="Show the delay.")
@_value("-set", "-s", name="delay_s", type=click.IntRange(0, 2**31 - 1), help="Seconds.")
@click.pass_obj
def lostbookierecoverydelay(load: Load, shows: bool, delay_s: int | None) -> None:
    """Show or set how long a bookie may be absent.

    Unlike Java's command it accepts 0.
    """
    if shows == (delay_s is not None):
        raise click.UsageError("Give -get, or -set with a number of seconds.")
    if delay_s is not None:
        run_with(load(), lambda cluster: set_recovery_delay(cluster, delay_s))
        click.echo(f"Successfully set LostBookieRecoveryDelay value in ZK: {delay_s}")
        return
    value = run_with(load(), read_recovery_delay)
    if value is None:
        click.echo("LostBookieRecoveryDelay is not set: no auditor has ever run.", err=True)
        sys.exit(EXIT_FAILED)
    click.echo(f"LostBookieRecoveryDelay value in ZK: {value}")


# --- Bookies --------------------------------------------------------------------------------------


@shell.command()
@_value("-bookieid", type=BookieArgument(), help="Default: node.bookie_id.")
@click.pass_context
def decommissionbookie(ctx: click.Context, bookieid: BookieId | None) -> None:
    """Remove a stopped bookie for good.

    It waits until no ledger names the bookie, and then deletes its cookie. As bookmender bookie
    decommission, which documents the exit codes.
    """
    settings: Settings = ctx.obj()
    bookie = bookieid or BookieId(settings.node.bookie_id)
    if not bookie:
        raise click.UsageError("Name the bookie with -bookieid, or set node.bookie_id.")
    done = run_with(settings, lambda cluster: decommission_visibly(cluster, bookie))
    click.echo(decommissioned_text(done))


# --- Ledgers --------------------------------------------------------------------------------------


@shell.command()
@click.argument("bookies", metavar="BOOKIE[,BOOKIE]...")
@click.argument("destination", required=False, metavar="[DESTINATION]")
@_flag("-query", "-q", hidden=True)
@_flag("-dryrun", "-dr", hidden=True)
@_flag("-force", "-f", help="Do not ask.")
@_value("-ledger", "-l", type=LedgerId(), help="Only this ledger.")
@_flag("-skipOpenLedgers", "-sk", name="skips_open", help="Only closed ledgers.")
@_flag("-deleteCookie", "-d", name="deletes_cookie", help="Also decommission them.")
@_flag("-skipUnrecoverableLedgers", "-sku", help="No effect.")
@_value("-replicationRate", "-rate", name="bytes_per_s", type=int, help="Bytes per second.")
@click.pass_context
def recover(
    ctx: click.Context,
    bookies: str,
    destination: str | None,
    query: bool,
    dryrun: bool,
    force: bool,
    ledger: int | None,
    skips_open: bool,
    deletes_cookie: bool,
    skipunrecoverableledgers: bool,
    bytes_per_s: int | None,
) -> None:
    """Repair the ledgers of stopped bookies.

    This process copies what they stored to other bookies. Unlike Java's command: each ledger is
    locked, only missing entries are copied, and open ledgers wait for the open-ledger grace.
    Unrecoverable ledgers are always skipped and listed. A registered bookie is refused: bookmender
    bookie drain moves its data while it runs. bookmender plan --bookie shows what would be copied.

    Exit codes: 0 done. 1 refused, or some ledgers are blocked. 3 unknown.
    """
    settings: Settings = ctx.obj()
    wanted: list[BookieId] = [
        BookieArgument().convert(each, None, ctx) for each in bookies.split(",")
    ]
    if destination is not None:
        click.echo("The destination is ignored: the placement policy chooses.", err=True)
    if query or dryrun:
        plans = ", ".join(f"bookmender plan --bookie {bookie}" for bookie in wanted)
        raise click.UsageError(f"-query and -dryrun are not here. Use: {plans}")
    run_with(settings, lambda cluster: _refuse_registered(cluster, wanted))
    if not force:
        click.confirm(f"Recover the data of {', '.join(wanted)}?", abort=True, err=True)
    if bytes_per_s is not None:
        rate = max(0, bytes_per_s)
        settings = replace(settings, replication=replace(settings.replication, bytes_per_s=rate))
    ledger_ids = run_with(
        settings, lambda here: _ledgers_to_recover(here, wanted, ledger, skips_open=skips_open)
    )
    done = repair_visibly(settings, tuple(ledger_ids), None)
    click.echo(result_text(done, mark_only=False, now_ms=SystemClock().wall_ms()))
    if not done.is_complete:
        sys.exit(EXIT_FAILED)
    if deletes_cookie:
        for bookie in wanted:
            gone = run_with(settings, partial(decommission_visibly, bookie=bookie))
            click.echo(decommissioned_text(gone))


async def _refuse_registered(cluster: AdminSession, bookies: Sequence[BookieId]) -> None:
    """Raise RejectedError if one of the bookies is registered, or the registrations are unknown."""
    available = (await cluster.registration.read()).available
    if registered := [bookie for bookie in bookies if bookie in available]:
        raise RejectedError(
            f"{', '.join(registered)} is registered. Stop it for good, or move its data while it "
            f"runs: bookmender bookie drain {' '.join(registered)} --wait"
        )


async def _ledgers_to_recover(
    cluster: AdminSession,
    bookies: Sequence[BookieId],
    ledger: int | None,
    *,
    skips_open: bool,
) -> list[int]:
    """Return the ledgers that name one of the bookies; only ``ledger`` if it is given.

    An unreadable ledger is included: the repair reports it.
    """
    if ledger is not None:
        metadata = (await cluster.manager.read(ledger)).metadata
        await _require_known(cluster, bookies, named=metadata.bookies)
        return [] if skips_open and not metadata.is_closed else [ledger]
    found_ids: list[int] = []
    named: set[BookieId] = set()
    async for ledger_ids in cluster.manager.ledger_ids():
        for start in range(0, len(ledger_ids), READS_AT_ONCE):
            part = await read_each(cluster.manager, ledger_ids[start : start + READS_AT_ONCE])
            for ledger_id, found in part.items():
                if isinstance(found, VersionedMetadata):
                    named |= found.metadata.bookies
                    is_skipped = skips_open and not found.metadata.is_closed
                    if is_skipped or found.metadata.bookies.isdisjoint(bookies):
                        continue
                found_ids.append(ledger_id)
    await _require_known(cluster, bookies, named=named)
    return found_ids
