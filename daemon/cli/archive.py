"""``bookmender archive``: archives all metadata outside the cluster, and restores it.

``daemon.operations.archive`` does the work.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import click
from msgspec.structs import replace

from archive.format import Record
from archive.order import RETENTION_DEFAULT_S
from archive.places import Place, open_place
from archive.reading import Archive, Point
from archive.restore import Clone, live_ledgers, plan_restore
from daemon.admin_session import AdminSession, log_errors_only, run_in_session, shared_clock
from daemon.cli.feed import confirm_deletion
from daemon.cli.main import EXIT_FAILED, CommandGroup, F, LedgerId, cluster_options
from daemon.cli.option_types import Duration
from daemon.cli.output import echo
from daemon.cli.progress import echo_notes
from daemon.logs import set_up_logs
from daemon.operations import archive_rehearsal
from daemon.operations.archive import (
    ArchiveDone,
    ArchiveStatus,
    disable_archive,
    enable_archive,
    order_base,
    read_archive,
)
from daemon.operations.archive_restore import (
    ArchivePoint,
    OnProgress,
    RestoreSummary,
    compare,
    find_point,
    forget,
    restore_cluster,
    restore_one,
    summary,
    url_of,
    verify,
)
from daemon.settings import LogSettings, Settings
from daemon.settings_source import settings_for_command
from daemon.words import counted, duration_text, printable
from ledgers.clock import SystemClock
from ledgers.model import BookieId
from ledgers.sizes import size_text


class Moment(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A moment: a time in UTC, a time before now such as ``2h``, or a checkpoint such as
    ``0x1c0000b2f``. Converted to a number, and True if it is a time in milliseconds."""

    name = "moment"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, bool]:
        if isinstance(value, tuple):
            return value
        if re.fullmatch("0x[0-9a-f]{1,16}", value):
            return int(value, 16), False
        try:
            moment = datetime.fromisoformat(value)
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            return int(moment.timestamp() * 1000), True
        except ValueError:
            pass
        try:
            return SystemClock().wall_ms() - Duration().convert(value, param, ctx) * 1000, True
        except click.BadParameter:
            self.fail(
                f"{value!r} is no moment. Examples: 2026-05-01T10:30:00, 2h (before now), "
                "0x1c0000b2f (a checkpoint)",
                param,
                ctx,
            )


from_option = click.option(
    "--from", "url", metavar="URL", help="The archive.  [default: that of the cluster]"
)
at_option = click.option(
    "--at", type=Moment(), help="The last point before this moment.  [default: the newest]"
)


def restore_options(command: F) -> F:
    """Add the options of commands that restore."""
    yes = click.option("--yes/--dry-run", help="Restore, or only show what would be restored.")
    return from_option(at_option(yes(cluster_options(command))))


def _open(config: Path | None, url: str | None) -> tuple[Settings, Place]:
    settings = settings_for_command(config, os.environ)
    log_errors_only(settings)
    return settings, open_place(asyncio.run(url_of(settings, url)))


def _place(config: Path | None, url: str | None) -> Place:
    """Open the archive. A host without settings can do so by its URL."""
    if url is None:
        return _open(config, url)[1]
    set_up_logs(LogSettings(level="error"))
    return open_place(url)


@click.group(cls=CommandGroup)
def archive() -> None:
    """Keep all metadata outside the cluster, and restore it.

    \b
      bookmender archive enable --to s3://BUCKET/bookmender   begin to archive
      bookmender archive status                               show how far the archive is
      bookmender archive verify                               read the archive completely
      bookmender archive restore plan --from URL              show what a restore would write

    The archive has the metadata of all ledgers, seconds old, and that of each moment of the last
    30 days. It contains the ledgers' passwords, so protect its place. docs/disaster.md says what to
    do when ZooKeeper has lost its data.
    """


@archive.command()
@click.option("--to", "url", required=True, metavar="URL", help="file:///PATH or s3://BUCKET/PATH.")
@click.option(
    "--include", "includes", multiple=True, metavar="PATH", help="Further znodes, with all below."
)
@click.option(
    "--retention",
    "retention_s",
    type=Duration(least_s=3600),
    default=f"{RETENTION_DEFAULT_S // 86_400}d",
    show_default=True,
    help="How long earlier states are kept.",
)
@cluster_options
def enable(
    url: str, includes: tuple[str, ...], retention_s: int, config: Path | None, output: str
) -> None:
    """Begin to archive. A node does it, so each node must reach the place.

    The change feed must be enabled. For Pulsar, --include /managed-ledgers --include /admin keeps
    what names the ledgers; these znodes are read once a minute, so they are not of one moment.
    """
    for path in includes:
        if not re.fullmatch("(/[^/]+)+", path):
            raise click.UsageError(f"--include needs an absolute path of a znode, not {path!r}.")

    async def act(cluster: AdminSession) -> ArchiveStatus:
        clock = await shared_clock(cluster)
        return await enable_archive(
            cluster, url, includes=includes, retention_s=retention_s, clock=clock
        )

    found = run_in_session(config, act)
    text = f"A node is going to archive to {url}. Watch the first base: bookmender archive status"
    echo(output, found, text)


@archive.command()
@cluster_options
def disable(config: Path | None, output: str) -> None:
    """End the archiving. The files stay."""
    was_enabled = run_in_session(config, disable_archive)
    text = "The archive is disabled. Its files stay." if was_enabled else "It was disabled already."
    echo(output, ArchiveDone(result=text), text)


@archive.command()
@cluster_options
def status(config: Path | None, output: str) -> None:
    """Show how far the archive is. Exit code 1: nothing is archived now."""
    now_ms = SystemClock().wall_ms()
    found = run_in_session(config, lambda cluster: read_archive(cluster, now_ms=now_ms))
    echo(output, found, "\n".join(_status_lines(found, now_ms=now_ms)))
    sys.exit(EXIT_FAILED if found.obstacle else 0)


def _status_lines(found: ArchiveStatus, *, now_ms: int) -> list[str]:
    if not found.is_enabled:
        return ["The archive is disabled. Enable it: bookmender archive enable --to URL"]
    by = f"by {printable(found.node)}" if found.node else "by no node"
    lines = [f"The metadata is archived to {printable(found.url)} {by}."]
    if found.archived_ms is None:
        count = found.base_record_count or 0
        lines.append(f"The first base is being written: {counted(count, 'record')} so far.")
    else:
        lag = duration_text(found.lag_s or 0)
        lines.append(f"It has everything up to {_time(found.archived_ms)}, {lag} ago.")
    if found.base_ms is not None:
        age = duration_text((now_ms - found.base_ms) / 1000)
        lines.append(f"The newest base is {age} old. {counted(found.number, 'file')} were written.")
    if found.denied_count:
        lines.append(f"ACLs hid {counted(found.denied_count, 'change')}, which are not archived.")
    return lines + list(found.obstacle or ())


@archive.command()
@cluster_options
def compact(config: Path | None, output: str) -> None:
    """Write a new base now, so that a restore reads less."""

    async def act(cluster: AdminSession) -> None:
        await order_base(cluster, clock=await shared_clock(cluster))

    run_in_session(config, act)
    text = "A new base is written soon: bookmender archive status"
    echo(output, ArchiveDone(result=text), text)


@archive.command(name="verify")
@click.option(
    "--rehearse", is_flag=True, help="Restore the newest point into a scratch ZooKeeper, too."
)
@from_option
@cluster_options
def verify_command(rehearse: bool, url: str | None, config: Path | None, output: str) -> None:
    """Read the archive completely. Exit code 1: it is damaged.

    --rehearse also starts a ZooKeeper on this host, restores into it, compares all bytes, and
    removes it. It needs Java.
    """
    place = _place(config, url)
    with _progress("Reading") as progress:
        found = verify(place, on_progress=progress)
    lines = [
        f"No damage: {counted(found.file_count, 'file')}, {size_text(found.byte_count)}, "
        f"{counted(found.record_count, 'record')}, {counted(found.base_count, 'base')}."
    ]
    if found.first is not None and found.last is not None:
        lines.append(f"It has each state from {_time(found.first.time_ms)} to {_at(found.last)}.")
    else:
        lines.append("It has no complete state yet.")
    lines += [f"Changes after {_time(gap)} are missing, until the next base." for gap in found.gaps]
    if rehearse:
        with _progress("Restoring") as progress:
            tried = archive_rehearsal.rehearse(
                place, tell=lambda text: echo_notes([text]), on_progress=progress
            )
        found = replace(found, rehearsal=tried)
        if tried.different:
            count = counted(len(tried.different), "difference")
            lines.append(f"REHEARSAL FAILED: {count}, such as {', '.join(tried.different[:5])}.")
        else:
            lines.append(
                f"Rehearsal succeeded: {counted(tried.ledger_count, 'ledger')} and "
                f"{counted(tried.cookie_count, 'cookie')} were restored in {tried.duration_s:g} s, "
                "and are equal byte for byte."
            )
    echo(output, found, "\n".join(lines))
    sys.exit(EXIT_FAILED if found.rehearsal and found.rehearsal.different else 0)


@contextmanager
def _progress(label: str) -> Iterator[OnProgress]:
    """Show a bar for the block. Yields what sets it: the number done, and that of all."""
    with click.progressbar(length=1, file=sys.stderr, label=label) as bar:

        def progress(done: int, count: int) -> None:
            bar.length = count
            bar.update(done - bar.pos)

        yield progress


@archive.command(name="forget")
@click.option("--from", "url", required=True, metavar="URL", help="The archive.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@cluster_options
def forget_command(url: str, yes: bool, config: Path | None, output: str) -> None:
    """Delete an archive that is not needed any more."""
    place = open_place(url)
    confirm_deletion(f"the archive {printable(url)}", yes=yes)
    count = forget(place)
    text = f"Deleted {counted(count, 'file')}."
    echo(output, ArchiveDone(result=text), text)


@archive.command()
@click.argument("before", type=Moment())
@click.argument("after", type=Moment(), required=False)
@click.option("--live", is_flag=True, help="Compare with ZooKeeper as it is now.")
@from_option
@cluster_options
def diff(
    before: tuple[int, bool],
    after: tuple[int, bool] | None,
    live: bool,
    url: str | None,
    config: Path | None,
    output: str,
) -> None:
    """Show which ledgers changed between two moments, or since one.

    \b
      bookmender archive diff 2h 1h
      bookmender archive diff 2026-05-01T10:30:00 --live
    """
    if live and after is not None:
        raise click.UsageError("--live needs one moment.")
    place = _place(config, url)
    first = find_point(place, before)
    later: Point | list[Record]
    if live:
        later = run_in_session(config, lambda each: live_ledgers(each.store, each.manager))
    else:
        later = find_point(place, after)
    found = compare(place, first, later)
    until = "now" if found.after is None else _at(found.after)
    lines = [f"{each.change}  ledger {each.ledger_id}" for each in found.ledgers]
    lines.append(f"{counted(len(lines), 'ledger')} from {_at(found.before)} to {until}.")
    echo(output, found, "\n".join(lines))


# --- Restoring ------------------------------------------------------------------------------------


@archive.group(cls=CommandGroup)
def restore() -> None:
    """Restore metadata. Without --yes nothing is written.

    Before a whole cluster is restored, stop all bookies, and start the new ZooKeeper only then: a
    bookie deletes each ledger that ZooKeeper does not list. docs/disaster.md has all steps.
    """


@restore.command()
@from_option
@at_option
@cluster_options
def plan(url: str | None, at: tuple[int, bool] | None, config: Path | None, output: str) -> None:
    """Show what a restore of a whole cluster writes, and how old it is. Needs no ZooKeeper."""
    place = _place(config, url)
    found = summary(place, plan_restore(Archive(place), find_point(place, at)))
    echo(output, found, "\n".join(_plan_lines(found)))


def _plan_lines(found: RestoreSummary) -> list[str]:
    until_ms = max(found.point.time_ms, found.confirmed_ms)
    age = duration_text((SystemClock().wall_ms() - until_ms) / 1000)
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(found.by_state.items()))
    lines = [
        f"State of {_at(found.point)}. What changed in the last {age} may be missing.",
        f"{counted(found.ledger_count, 'ledger')} ({states}), {size_text(found.ledger_bytes)}; "
        f"{counted(found.znode_count, 'other znode')} below {found.root}.",
        f"Cookies of {counted(len(found.bookies), 'bookie')}: {', '.join(found.bookies)}",
        f"New ledgers get ids from {found.first_new_id:,} on, so that no id is given twice.",
    ]
    if found.unreadable_count:
        lines.append(f"{counted(found.unreadable_count, 'ledger')} cannot be parsed; kept as is.")
    if not found.point.is_exact:
        lines.append("Some ledgers have metadata of a moment later.")
    return lines


@restore.command(name="cluster")
@restore_options
def cluster_command(**given: Any) -> None:
    """Restore all metadata into a ZooKeeper that has lost it.

    Bookies must be stopped, and the ledgers root must not exist. After a kill, run it again.
    Auto-recovery is disabled afterwards: start the bookies, check the data (bookmender fsck run),
    and only then: bookmender enable.
    """
    _restore(**given, clone=None)


@restore.command()
@click.option(
    "--bookie",
    "pairs",
    multiple=True,
    metavar="OLD=NEW",
    help="The id of a bookie in the clone. May be repeated.",
)
@restore_options
def clone(pairs: tuple[str, ...], **given: Any) -> None:
    """Restore the metadata as another cluster, with other bookies and another instance id.

    Cookies, orders and included znodes are left out.
    """
    bookies = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise click.UsageError(f"--bookie needs OLD=NEW, not {pair!r}.")
        bookies[BookieId(old)] = BookieId(new)
    _restore(**given, clone=Clone(instance_id=str(uuid4()), bookies=bookies))


def _restore(
    *,
    url: str | None,
    at: tuple[int, bool] | None,
    yes: bool,
    config: Path | None,
    output: str,
    clone: Clone | None,
) -> None:
    if url is None:
        raise click.UsageError("Name the archive: --from URL")
    settings, place = _open(config, url)
    planned = plan_restore(Archive(place), find_point(place, at))
    if not yes:
        asyncio.run(restore_cluster(settings, place, planned, clone=clone, only_check=True))
        found = summary(place, planned)
        lines = [*_plan_lines(found), "Nothing stands against it. --yes restores it."]
        echo(output, found, "\n".join(lines))
        return
    with _progress("Ledgers") as progress:
        restoring = restore_cluster(settings, place, planned, clone=clone, on_progress=progress)
        asyncio.run(restoring)
    found = summary(place, planned, is_done=True)
    text = (
        f"Restored {counted(found.ledger_count, 'ledger')}. Auto-recovery is disabled. Start the "
        "bookies, then check the data: bookmender fsck run. Then: bookmender enable"
    )
    echo(output, found, text)


@restore.command(name="ledger")
@click.argument("ledger_id", type=LedgerId())
@restore_options
def ledger_command(
    ledger_id: int,
    url: str | None,
    at: tuple[int, bool] | None,
    yes: bool,
    config: Path | None,
    output: str,
) -> None:
    """Give one ledger the metadata of an earlier moment.

    If the ledger was deleted, it is created again. Else the bookies are asked first whether they
    have the copies that the earlier metadata names.
    """
    settings, place = _open(config, url)
    restoring = restore_one(
        settings,
        place,
        find_point(place, at),
        ledger_id,
        acts=yes,
        tell=lambda text: echo_notes([text]),
    )
    result = asyncio.run(restoring)
    echo(output, ArchiveDone(result=result), f"Ledger {ledger_id}: {result}")


def _time(time_ms: int) -> str:
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return moment.isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")


def _at(point: ArchivePoint) -> str:
    return f"{_time(point.time_ms)} (checkpoint {point.checkpoint:#x})"
