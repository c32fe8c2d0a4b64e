"""The points of an archive, and what a restore of one writes, for operators."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

from archive.format import LATEST, FileKind, Header, Record
from archive.order import read_order
from archive.places import Place
from archive.reading import Archive, Point, no_archive
from archive.restore import Clone, Restore, RestorePlan, RestoreRefusedError, differences
from checkpoints.model import ledger_id_of
from daemon.admin_session import (
    admin_session,
    note_order,
    operator,
    order_event,
    writing_session,
)
from daemon.answers import Answer
from daemon.operations.restore import (
    Restored,
    look_before_restoring,
    metadata_lines,
    restore_ledger,
)
from daemon.settings import Settings
from daemon.words import counted
from daemon.zookeeper import open_store
from ledgers.clock import SystemClock
from ledgers.codec.registration import Address
from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    NoNodeError,
    RejectedError,
    SettingsError,
)
from ledgers.host_names import connect
from ledgers.model import BookieId
from replication.by_hand import Tell, readable
from replication.journal import JournalRecord
from replication.znodes import ClusterPaths

OnLeft = Callable[[int], None]
"""Called with the number of files or ledgers that are left."""
ORDER_CLUSTER, ORDER_LEDGER = "archive restore cluster", "archive restore ledger"
"""Names of orders in the history."""
UNUSED_S = 20
"""A node that archives notes a checkpoint that is 5 s old at most, as long as the leader works."""
CONNECT_S = 5.0
BOOKIE_HOST = re.compile(rb'^bookieHost: "([^"]+)"', re.MULTILINE)
"""The address in a cookie."""


async def url_of(settings: Settings, given: str | None) -> str:
    """Return the URL that was given, else the one in the order of the cluster."""
    if given is not None:
        return given
    async with admin_session(settings) as cluster:
        order = (await read_order(cluster.store, cluster.paths)).value
    if order is None:
        raise SettingsError("the cluster has no archive. Name one: --from URL")
    return order.url


# --- Points ---------------------------------------------------------------------------------------


class ArchivePoint(Answer, frozen=True, kw_only=True):
    """A moment whose state the archive has."""

    time_ms: int
    checkpoint: int
    generation: int
    is_exact: bool
    """No ledger has later metadata than at this moment."""

    @classmethod
    def of(cls, header: Header) -> ArchivePoint:
        return cls(
            time_ms=header.time_ms,
            checkpoint=header.end,
            generation=header.generation,
            is_exact=header.is_exact,
        )


class Rehearsed(Answer, frozen=True, kw_only=True):
    """A restore of the newest point into a scratch ZooKeeper."""

    ledger_count: int
    cookie_count: int
    duration_s: float
    """Seconds that the restore took, without starting ZooKeeper and comparing."""
    different: list[str]
    """Ledgers and znodes that are not there byte for byte; empty: the rehearsal succeeded."""


class Verified(Answer, frozen=True, kw_only=True):
    """A complete reading of an archive that found no damage."""

    file_count: int
    byte_count: int
    record_count: int
    base_count: int
    first: ArchivePoint | None
    """The first point that can be restored."""
    last: ArchivePoint | None
    confirmed_ms: int
    """Up to this time nothing changed after ``last``; 0: unknown, or something did."""
    gaps: tuple[int, ...]
    """Times after which changes are missing until the next base."""
    rehearsal: Rehearsed | None = None
    """null: none was asked for."""


def verify(archive: Archive, *, on_left: OnLeft) -> Verified:
    """Read all files. It blocks. Raises CorruptionError, and NoSuchPointError if there is no
    file."""
    archive.latest()
    if not (numbers := archive.numbers()):
        raise no_archive()
    byte_count = record_count = base_count = 0
    first: Header | None = None
    end: Header | None = None
    gaps: list[int] = []
    try:
        for stored in archive.files(numbers[0], numbers[-1]):
            header = stored.header
            byte_count += len(stored.data)
            record_count += len(stored.records())
            if header.kind is FileKind.BASE:
                base_count += 1
                if header.first_page >= numbers[0]:
                    first = first or header
            elif header.kind is FileKind.SEGMENT:
                if end and (end.generation, end.end) != (header.generation, header.begin):
                    gaps.append(end.time_ms)
                end = header
            on_left(numbers[-1] - header.number)
    except CorruptionError as error:
        raise CorruptionError(
            f"{error.args[0]}. Other states may be whole: bookmender archive restore plan "
            "--from URL --at MOMENT. To have whole states from now on, archive to another URL",
            **error.context,
        ) from error
    point = archive.point(is_exact=False) if any(archive.bases()) else None
    if point is None and (base_count or numbers[0] > 1):
        raise CorruptionError("the first files of the archive are missing: nothing can be restored")
    return Verified(
        file_count=len(numbers),
        byte_count=byte_count,
        record_count=record_count,
        base_count=base_count,
        first=ArchivePoint.of(first) if first else None,
        last=ArchivePoint.of(point.header) if point else None,
        confirmed_ms=archive.confirmed_ms(point) if point else 0,
        gaps=tuple(gaps),
    )


class ChangedLedger(Answer, frozen=True, kw_only=True):
    """A ledger that differs between two moments."""

    ledger_id: int
    change: str
    """``created``, ``changed`` or ``deleted``."""


class ArchiveDifference(Answer, frozen=True, kw_only=True):
    """What changed between two moments."""

    before: ArchivePoint
    after: ArchivePoint | None
    """null: the present state of ZooKeeper."""
    ledgers: list[ChangedLedger]


def compare(archive: Archive, before: Point, after: Point | list[Record]) -> ArchiveDifference:
    """Compare a point with another one, or with the ledgers that ZooKeeper has. It blocks. Raises
    CorruptionError."""
    later = archive.state(after) if isinstance(after, Point) else after
    ledgers = []
    for each in differences(archive.state(before), later):
        if (ledger_id := ledger_id_of(each.key)) is not None:
            change = (
                "deleted" if each.after is None else "created" if each.before is None else "changed"
            )
            ledgers.append(ChangedLedger(ledger_id=ledger_id, change=change))
    return ArchiveDifference(
        before=ArchivePoint.of(before.header),
        after=ArchivePoint.of(after.header) if isinstance(after, Point) else None,
        ledgers=sorted(ledgers, key=lambda each: each.ledger_id),
    )


def check_unused(place: Place, *, now_ms: int) -> None:
    """Raise RejectedError if a node archives to this place. It blocks."""
    archive, written_ms = Archive(place), 0
    with suppress(CorruptionError):
        written_ms = head.header.time_ms if (head := archive.head()) else 0
    with suppress(CorruptionError):
        written_ms = max(written_ms, latest.time_ms if (latest := archive.latest()) else 0)
    if now_ms - written_ms < UNUSED_S * 1000:
        raise RejectedError(
            f"a node archives there: it wrote {max(0, now_ms - written_ms) / 1000:.0f} s ago. "
            f"First: bookmender archive disable. Try again after {UNUSED_S} s"
        )


def forget(place: Place) -> int:
    """Delete all files of an archive, the oldest first. It blocks. Return their number."""
    names = [name for _, name in Archive(place).stored()]
    for name in [*names, LATEST]:
        place.delete(name)
    return len(names)


# --- Restoring ------------------------------------------------------------------------------------


class RestoreSummary(Answer, frozen=True, kw_only=True):
    """What a restore writes, or has written."""

    point: ArchivePoint
    until_ms: int
    """The state was the same from the point until this time. Later changes are missing."""
    root: str
    by_state: dict[str, int]
    """Ledgers, also those whose state is ``unreadable``."""
    znode_count: int
    """Other znodes: orders, cookies, further trees."""
    bookies: list[str]
    """Bookies whose cookies are restored."""
    first_new_id: int
    """New ledgers get this id or a higher one."""
    has_begun: bool = False
    """A restore of this point was interrupted, and goes on."""
    obstacle: str = ""
    """Why the restore would be refused; empty if it would not."""
    unasked: tuple[str, ...] = ()
    """Bookies that may be running: their address does not answer, or their cookie has none."""

    @classmethod
    def of(cls, plan: RestorePlan, clone: Clone | None) -> RestoreSummary:
        others = plan.others if clone is None else clone.others(plan.others)
        return cls(
            point=ArchivePoint.of(plan.point.header),
            until_ms=plan.until_ms,
            root=plan.point.header.root,
            by_state=dict(plan.by_state),
            znode_count=len(others),
            bookies=list(plan.bookies) if clone is None else [],
            first_new_id=plan.first_new_id,
        )


async def restore_cluster(
    settings: Settings,
    archive: Archive,
    plan: RestorePlan,
    *,
    clone: Clone | None = None,
    only_check: bool = False,
    on_left: OnLeft = lambda left: None,
) -> bool:
    """Restore the metadata into the ZooKeeper of the settings. ``only_check``: only raise what
    stands against it. Return True if an earlier restore was interrupted. Raises what
    ``Restore.run`` raises."""
    archived_root = plan.point.header.root
    uri = settings.uri
    root = archived_root if uri.pulsar_root == archived_root else uri.root
    async with open_store(settings) as store:
        restore = Restore(
            store=store,
            root=root,
            archive=archive,
            plan=plan,
            clock=SystemClock(),
            clone=clone,
            on_progress=lambda count: on_left(plan.ledger_count - count),
        )
        if only_check:
            return await restore.check()
        had_begun = await restore.run()
        at = datetime.fromtimestamp(plan.until_ms / 1000, UTC)
        event = order_event(ORDER_CLUSTER, reason=f"as of {at:%Y-%m-%d %H:%M:%S} UTC")
        await note_order(store, ClusterPaths.below(root), event, by=operator())
        return had_begun


async def check_bookies(plan: RestorePlan) -> list[BookieId]:
    """Raise RestoreRefusedError if a bookie of the archive accepts a connection. A bookie that runs
    on after the loss of ZooKeeper is not registered, and may register again at any moment. Return
    the bookies that may be running: their address does not answer, or their cookie has none."""

    async def runs(bookie: BookieId) -> bool | None:
        """Return None if that is unknown."""
        found = BOOKIE_HOST.search(plan.others[f"cookies/{bookie}"])
        host, _, port = (found[1].decode() if found else bookie).rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
            return None
        try:
            async with asyncio.timeout(CONNECT_S):
                address = Address(host.strip("[]"), int(port))
                transport, _ = await connect(asyncio.Protocol, address)
        except ConnectionRefusedError:
            return False
        except (OSError, BookmenderError):
            return None
        transport.abort()
        return True

    answers = dict(zip(plan.bookies, await asyncio.gather(*map(runs, plan.bookies)), strict=True))
    if running := [bookie for bookie, answer in answers.items() if answer]:
        raise RestoreRefusedError(
            f"{counted(len(running), 'bookie')} of the archive accepted a connection, such as "
            f"{running[0]}. Stop all bookies first: a bookie deletes what ZooKeeper does not list "
            "yet. If other programs use these ports: --bookies-stopped"
        )
    return [bookie for bookie, answer in answers.items() if answer is None]


async def restore_one(
    settings: Settings,
    archive: Archive,
    point: Point,
    ledger_id: int,
    *,
    acts: bool,
    is_forced: bool,
    tell: Tell,
) -> Restored:
    """Give a ledger the metadata that it had, and return what changed, or would change. Raises
    RejectedError, and RestoreRefusedError if copies may be missing and it is not forced."""
    records = archive.state(point)
    found = (record.data for record in records if record.ledger_id == ledger_id)
    archived = await asyncio.to_thread(lambda: next(found, None))
    if archived is None:
        raise RejectedError(
            f"ledger {ledger_id} did not exist at that moment of the archive. Choose another one: "
            "--at MOMENT"
        )
    async with writing_session(settings) as ours:
        store, path = ours.cluster.store, ours.manager.path(ledger_id)
        try:
            present, _ = await store.get(path)
        except NoNodeError:
            result = "the ledger does not exist now. --yes creates it"
            if acts:
                await store.create(path, archived, with_parents=True)
                await ours.cluster.note_order(order_event(ORDER_LEDGER), [ledger_id])
                result = f"created. Check its copies: bookmender repair {ledger_id}"
            return Restored(
                ledger_id=ledger_id,
                time_ms=point.header.time_ms,
                now=[],
                restored=metadata_lines(readable(archived)),
                doubts=[],
                result=result,
            )
        record = JournalRecord(
            time_ms=point.header.time_ms,
            ledger_id=ledger_id,
            before=archived,
            after=present,
            cluster=ours.cluster_id,
        )
    if acts:
        return await restore_ledger(
            settings, record, is_forced=is_forced, tell=tell, name=ORDER_LEDGER
        )
    return await look_before_restoring(settings, record, tell=tell)
