"""``bookmender archive``: archives all metadata outside the cluster, and restores it.

``daemon.operations.archive`` does the work.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import click
from msgspec.structs import replace

from archive.format import Record
from archive.order import RETENTION_DEFAULT_S
from archive.places import open_place
from archive.reading import Archive, Point
from archive.restore import Clone, RestoreRefusedError, live_ledgers, plan_restore
from daemon.admin_session import AdminSession, shared_clock
from daemon.cli.feed import confirm_deletion
from daemon.cli.ledger import restored_text
from daemon.cli.main import EXIT_FAILED, CommandGroup, LedgerId, cluster_options, output_option
from daemon.cli.option_types import Duration
from daemon.cli.output import echo
from daemon.cli.progress import ProgressLine, echo_notes
from daemon.cli.session import log_errors_only, run_in_session, settings_for_command
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
    ArchiveDifference,
    ArchivePoint,
    RestoreSummary,
    check_bookies,
    check_unused,
    compare,
    forget,
    restore_cluster,
    restore_one,
    url_of,
    verify,
)
from daemon.settings import LogSettings, Settings
from daemon.words import counted, duration_text, parse_duration_s, printable
from ledgers.clock import SystemClock
from ledgers.errors import BookmenderError
from ledgers.model import BookieId
from ledgers.sizes import size_text

NEWEST = "newest"

FindPoint = Callable[[Archive], Point]


class Moment(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A moment: a time in UTC, a time before now such as ``2h``, or a checkpoint such as
    ``0x1c0000b2f``. Converted to a function that finds the last point before it."""

    name = "moment"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> FindPoint:
        if value == NEWEST:
            return partial(Archive.point, is_exact=False)
        if re.fullmatch("0x[0-9a-f]{1,16}", value):
            return partial(Archive.point, checkpoint=int(value, 16), is_exact=False)
        try:
            return partial(Archive.point, time_ms=_time_ms(value))
        except ValueError:
            self.fail(
                f"{value!r} is no moment of the past. Examples: 2026-05-01T10:30:00, 2h (before "
                "now), 0x1c0000b2f (a checkpoint)",
                param,
                ctx,
            )


def _time_ms(text: str) -> int:
    """Raises ValueError, also if the moment is in the future."""
    now_ms = SystemClock().wall_ms()
    with suppress(ValueError):
        return now_ms - parse_duration_s(text, least_s=1) * 1000
    moment = datetime.fromisoformat(text)
    time_ms = int(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() * 1000)
    if time_ms > now_ms:
        raise ValueError("it is in the future")
    return time_ms


from_option = click.option(
    "--from", "url", metavar="URL", help="The archive.  [default: that of the cluster]"
)
from_other_option = click.option("--from", "url", required=True, metavar="URL", help="The archive.")
at_option = click.option(
    "--at",
    type=Moment(),
    default=NEWEST,
    show_default=True,
    help="The last point before this moment.",
)
yes_option = click.option("--yes/--dry-run", help="Restore, or only show what would be restored.")
stopped_option = click.option(
    "--bookies-stopped",
    is_flag=True,
    help="You know that no bookie runs, though something answers at its address.",
)


def _open(config: Path | None, url: str | None) -> tuple[Settings, Archive]:
    settings = settings_for_command(config)
    log_errors_only(settings)
    return settings, Archive(open_place(asyncio.run(url_of(settings, url))))


def _open_alone(config: Path | None, url: str | None) -> Archive:
    """Open the archive. A host without settings can do so by its URL."""
    if url is None:
        return _open(config, url)[1]
    set_up_logs(LogSettings(level="error"))
    return Archive(open_place(url))


@click.group(cls=CommandGroup)
def archive() -> None:
    """Archive all metadata, and restore it.

    \b
      bookmender archive enable --to s3://BUCKET/bookmender   begin to archive
      bookmender archive status                               show how far the archive is
      bookmender archive verify                               read the archive completely
      bookmender archive restore cluster --from URL           show what a restore would write

    The archive is outside the cluster. It has the metadata of all ledgers, seconds old, and earlier
    states of the last 30 days. It contains the ledgers' passwords, so protect its place.
    docs/disaster.md says what to do when ZooKeeper has lost its data.
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
    help=f"How long earlier states are kept; at first {RETENTION_DEFAULT_S // 86_400} days.",
)
@cluster_options
def enable(
    url: str, includes: tuple[str, ...], retention_s: int | None, config: Path | None, output: str
) -> None:
    """Begin to archive, or change what is archived. Each node must reach the place.

    The change feed must be enabled. For Pulsar, --include /managed-ledgers --include /admin keeps
    what names the ledgers; these znodes are read once a minute, so they are not of one moment.
    """
    for path in includes:
        if not re.fullmatch("(/[^/]+)+", path):
            raise click.UsageError(f"--include needs an absolute path of a znode, not {path!r}.")

    async def act(cluster: AdminSession) -> ArchiveStatus:
        clock = await shared_clock(cluster)
        return await enable_archive(
            cluster, url, includes=includes or None, retention_s=retention_s, clock=clock
        )

    found = run_in_session(config, act)
    lines = [
        f"A node is going to archive to {printable(url)}. Watch the first base: bookmender archive "
        "status"
    ]
    lines += [f"There is no znode {printable(path)} yet." for path in found.missing_includes]
    echo(output, found, "\n".join(lines))


@archive.command()
@cluster_options
def disable(config: Path | None, output: str) -> None:
    """Disable the archive. Its files stay."""
    was_enabled = run_in_session(config, disable_archive)
    text = "The archive is disabled. Its files stay." if was_enabled else "It was disabled already."
    echo(output, ArchiveDone(result=text), text)


@archive.command()
@cluster_options
def compact(config: Path | None, output: str) -> None:
    """Write a new base now.

    A restore then reads less. This also happens by itself.
    """

    async def act(cluster: AdminSession) -> None:
        await order_base(cluster, clock=await shared_clock(cluster))

    run_in_session(config, act)
    text = "A new base is written soon: bookmender archive status"
    echo(output, ArchiveDone(result=text), text)


@archive.command(name="forget")
@click.option("--from", "url", required=True, metavar="URL", help="The archive.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@output_option
def forget_command(url: str, yes: bool, output: str) -> None:
    """Delete an archive. Disable it first."""
    set_up_logs(LogSettings(level="error"))
    place = open_place(url)
    check_unused(place, now_ms=SystemClock().wall_ms())
    confirm_deletion(f"the archive {printable(url)}", yes=yes)
    text = f"Deleted {counted(forget(place), 'file')}."
    echo(output, ArchiveDone(result=text), text)


@archive.command()
@cluster_options
def status(config: Path | None, output: str) -> None:
    """Show how far the archive is. Exit code 1: nothing is archived now."""
    now_ms = SystemClock().wall_ms()
    found = run_in_session(config, lambda cluster: read_archive(cluster, now_ms=now_ms))
    echo(output, found, "\n".join(_status_lines(found)))
    sys.exit(0 if found.node and not found.obstacle else EXIT_FAILED)


def _status_lines(found: ArchiveStatus) -> list[str]:
    if not found.is_enabled:
        return ["The archive is disabled. Enable it: bookmender archive enable --to URL"]
    by = f"by {printable(found.node)}" if found.node else "by no node"
    lines = [f"The metadata is archived to {printable(found.url)} {by}."]
    if found.archived_ms is None:
        lines.append("Nothing new can be restored until the first base is complete.")
    else:
        lag = duration_text(found.lag_s or 0)
        lines.append(f"It has everything up to {_time(found.archived_ms)}, {lag} ago.")
    if found.denied_count:
        lines.append(f"ACLs hid {counted(found.denied_count, 'change')}, which are not archived.")
    return [*lines, found.obstacle, found.action] if found.obstacle else lines


@archive.command(name="verify")
@click.option(
    "--rehearse", is_flag=True, help="Restore the newest point into a scratch ZooKeeper, too."
)
@from_option
@cluster_options
def verify_command(rehearse: bool, url: str | None, config: Path | None, output: str) -> None:
    """Read and verify the whole archive.

    Exit code 1: it is damaged.

    --rehearse also starts a ZooKeeper on this host, restores into it, compares all bytes, and
    removes it. It needs Java.
    """
    opened = _open_alone(config, url)
    with ProgressLine(unit="file") as line:
        found = verify(opened, on_left=line.show)
    lines = [
        f"No damage: {counted(found.file_count, 'file')}, {size_text(found.byte_count)}, "
        f"{counted(found.record_count, 'record')}, {counted(found.base_count, 'base')}."
    ]
    if found.first is not None and found.last is not None:
        lines.append(f"It has states from {_time(found.first.time_ms)} to {_at(found.last)}.")
    else:
        lines.append("It has no complete state yet.")
    lines += [f"Changes after {_time(gap)} are missing, until the next base." for gap in found.gaps]
    if rehearse:
        with ProgressLine() as line:
            tried = archive_rehearsal.rehearse(opened, tell=line.note, on_left=line.show)
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


@archive.command()
@click.argument("before", type=Moment())
@click.argument("after", type=Moment(), default=NEWEST)
@click.option("--live", is_flag=True, help="Compare with ZooKeeper as it is now.")
@from_option
@cluster_options
def diff(
    before: FindPoint,
    after: FindPoint,
    live: bool,
    url: str | None,
    config: Path | None,
    output: str,
) -> None:
    """Show which ledgers changed since a moment.

    With two moments, it shows which ledgers changed between them.

    \b
      bookmender archive diff 2h 1h
      bookmender archive diff 2026-05-01T10:30:00 --live
    """
    opened = _open_alone(config, url)
    first = before(opened)
    later: Point | list[Record]
    if live:
        later = run_in_session(config, lambda each: live_ledgers(each.store, each.manager))
    else:
        later = after(opened)
    found = compare(opened, first, later)
    echo(output, found, "\n".join(_difference_lines(found)))


def _difference_lines(found: ArchiveDifference) -> list[str]:
    until = "now" if found.after is None else _at(found.after)
    lines = [f"{each.change}  ledger {each.ledger_id}" for each in found.ledgers]
    return [*lines, f"{counted(len(lines), 'ledger')} from {_at(found.before)} to {until}."]


# --- Restoring ------------------------------------------------------------------------------------


@archive.group(cls=CommandGroup)
def restore() -> None:
    """Restore metadata from the archive.

    Without --yes nothing is written. Before a whole cluster is restored, stop all bookies, and
    start the new ZooKeeper only then: a bookie deletes each ledger that ZooKeeper does not list.
    docs/disaster.md has all steps.
    """


@restore.command()
@from_other_option
@at_option
@stopped_option
@cluster_options
def plan(url: str, at: FindPoint, bookies_stopped: bool, config: Path | None, output: str) -> None:
    """Show what a restore would write.

    That is a restore of the whole cluster. It also shows what stands against it.
    """
    _restore(url, at, config, output, acts=False, asks_bookies=not bookies_stopped)


@restore.command(name="cluster")
@from_other_option
@at_option
@stopped_option
@yes_option
@cluster_options
def cluster_command(
    url: str,
    at: FindPoint,
    bookies_stopped: bool,
    yes: bool,
    config: Path | None,
    output: str,
) -> None:
    """Restore a ZooKeeper that lost all metadata.

    Bookies must be stopped, and the ledgers root must not exist. After a kill, run it again.
    Auto-recovery is disabled afterwards: start the bookies, check the data (bookmender fsck run),
    and only then: bookmender enable.
    """
    _restore(url, at, config, output, acts=yes, asks_bookies=not bookies_stopped)


@restore.command()
@click.option(
    "--bookie",
    "pairs",
    multiple=True,
    metavar="OLD=NEW",
    help="The id of a bookie in the clone. May be repeated.",
)
@from_other_option
@at_option
@yes_option
@cluster_options
def clone(
    pairs: tuple[str, ...], url: str, at: FindPoint, yes: bool, config: Path | None, output: str
) -> None:
    """Restore all metadata as another cluster.

    The clone has other bookies and another instance id. Cookies, orders and included znodes are
    left out.
    """
    bookies = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise click.UsageError(f"--bookie needs OLD=NEW, not {pair!r}.")
        bookies[BookieId(old)] = BookieId(new)
    made = Clone(instance_id=str(uuid4()), bookies=bookies)
    _restore(url, at, config, output, acts=yes, clone=made)


def _restore(
    url: str,
    at: FindPoint,
    config: Path | None,
    output: str,
    *,
    acts: bool,
    clone: Clone | None = None,
    asks_bookies: bool = False,
) -> None:
    settings, opened = _open(config, url)
    plan = plan_restore(opened, at(opened))
    found = RestoreSummary.of(plan, clone)
    act = partial(restore_cluster, settings, opened, plan, clone=clone)
    if not acts:
        try:
            if asks_bookies:
                found = replace(found, unasked=tuple(asyncio.run(check_bookies(plan))))
            found = replace(found, has_begun=asyncio.run(act(only_check=True)))
        except RestoreRefusedError as error:
            found = replace(found, obstacle=str(error))
        echo(output, found, "\n".join(_plan_lines(found)))
        sys.exit(EXIT_FAILED if found.obstacle else 0)
    if asks_bookies:
        found = replace(found, unasked=tuple(asyncio.run(check_bookies(plan))))
    try:
        with ProgressLine() as line:
            found = replace(found, has_begun=asyncio.run(act(on_left=line.show)))
    except RestoreRefusedError:
        raise
    except (KeyboardInterrupt, BookmenderError):
        echo_notes(["Not complete. Start no bookie; run the same again, and it goes on."])
        raise
    text = (
        f"Restored {counted(plan.ledger_count, 'ledger')}. Auto-recovery is disabled. Start the "
        "bookies, then check the data: bookmender fsck run. Then: bookmender enable"
    )
    echo(output, found, text)


def _plan_lines(found: RestoreSummary) -> list[str]:
    age = duration_text((SystemClock().wall_ms() - found.until_ms) / 1000)
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(found.by_state.items()))
    lines = [
        f"State of {_at(found.point)}. What changed in the last {age} may be missing.",
        f"{counted(sum(found.by_state.values()), 'ledger')} ({states}); "
        f"{counted(found.znode_count, 'other znode')}; root {found.root}.",
        f"Cookies of {counted(len(found.bookies), 'bookie')}: {', '.join(found.bookies)}"
        if found.bookies
        else "No cookies: the bookies of the clone bring theirs.",
        f"New ledgers get ids from {found.first_new_id:,} on, so that no id is given twice.",
    ]
    if not found.point.is_exact:
        lines.append("Some ledgers have metadata of a moment later.")
    if found.unasked:
        named = ", ".join(map(printable, found.unasked))
        lines.append(f"Make sure that these bookies are stopped, which did not answer: {named}.")
    if found.obstacle:
        return [*lines, f"It would be refused: {printable(found.obstacle)}."]
    if found.has_begun:
        return [*lines, "A restore of this point was interrupted. --yes goes on with it."]
    return [*lines, "Nothing stands against it. --yes restores it."]


@restore.command(name="ledger")
@click.argument("ledger_id", type=LedgerId())
@from_option
@at_option
@yes_option
@click.option("--force", is_flag=True, help="Restore it even if copies may be missing.")
@cluster_options
def ledger_command(
    ledger_id: int,
    url: str | None,
    at: FindPoint,
    yes: bool,
    force: bool,
    config: Path | None,
    output: str,
) -> None:
    """Restore the metadata of one ledger.

    The ledger gets the metadata of an earlier moment. If the ledger was deleted, it is created
    again. Else the bookies are asked first whether they have the copies that the earlier metadata
    names.
    """
    settings, opened = _open(config, url)
    restoring = restore_one(
        settings,
        opened,
        at(opened),
        ledger_id,
        acts=yes,
        is_forced=force,
        tell=lambda text: echo_notes([text]),
    )
    done = asyncio.run(restoring)
    echo(output, done, restored_text(done, as_of="archived at"))
    if done.is_in_doubt and not force:
        sys.exit(EXIT_FAILED)


def _time(time_ms: int) -> str:
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return moment.isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")


def _at(point: ArchivePoint) -> str:
    return f"{_time(point.time_ms)} (checkpoint {point.checkpoint:#x})"
