"""The entry point of an executor: checks ledgers independently of each other, and yields a verdict
for each. Changes no ledger, and fences none.

Ledgers that seem wrong get a second look (``recheck``) later in the run, with metadata read again.
Only then are they reported.

Finds ledgers whose metadata is unchanged, without reading the metadata.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import structlog

from auditor.checks.copies import LOOKS_MAX, SECOND_LOOK_S
from auditor.fsck.budget import BeginPace, FixedPace
from auditor.fsck.executor import Executor, open_executor, read_session
from auditor.fsck.levels import FsckOptions, Level
from auditor.fsck.verdicts import Evidence, Finding, Grade, LedgerVerdict
from ledgers.errors import BookmenderError, CorruptionError, UnauthorizedError
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.tasks import gather_in_parts, task_scope

METADATA_AT_ONCE = 512
"""Ledgers checked at once if no bookie is asked: as many as ZooKeeper answers at a time."""
VERDICTS_WAITING_MAX = 1_000
"""Maximum number of verdicts that the caller has not fetched yet."""

log = structlog.get_logger()
T = TypeVar("T")
LookFunction = Callable[[Executor, T], Awaitable[LedgerVerdict | None]]


def inspect(
    options: FsckOptions, ledger_ids: Iterable[int], *, begin_pace: BeginPace = FixedPace
) -> AsyncGenerator[LedgerVerdict, None]:
    """Yield a verdict for each existing ledger, in the order of completion. A deleted ledger yields
    none.

    Opens one session, and one connection of each kind to each bookie. Raises SessionLostError,
    UnavailableError (ZooKeeper does not answer), SettingsError (no such cluster); then nothing is
    known about the remaining ledgers. A caller that stops early must close the generator
    (``aclosing``).
    """
    return _verdicts(options, ledger_ids, look_at, begin_pace)


def recheck(
    options: FsckOptions, verdicts: Iterable[LedgerVerdict], *, begin_pace: BeginPace = FixedPace
) -> AsyncGenerator[LedgerVerdict, None]:
    """Yield the final verdicts on ledgers whose first verdict ``seems_wrong``. Otherwise as
    ``inspect``.

    Of open ledgers, only entries acknowledged at the first look are expected. They are idle if
    nothing has been written since.
    """
    return _verdicts(options, verdicts, look_again, begin_pace)


async def look_at(executor: Executor, ledger_id: int) -> LedgerVerdict | None:
    """Return the verdict of the first look; None if the ledger is deleted."""
    return await _look(executor, ledger_id, None)


async def look_again(executor: Executor, since: LedgerVerdict) -> LedgerVerdict | None:
    """Return the verdict of the second look; None if the ledger is deleted.

    A bad verdict counts only if the metadata did not change while the bookies were asked. Otherwise
    a repair or a writer may have replaced the bookies that were found bad. After ``LOOKS_MAX`` such
    changes the grade is ``UNKNOWN``.
    """
    clock, manager, ledger_id = executor.clock, executor.manager, since.ledger_id
    # Not below 0: the first look may have been on a host whose clock is ahead.
    passed_s = max(0.0, (clock.wall_ms() - since.checked_ms) / 1_000)
    await clock.sleep(max(0.0, SECOND_LOOK_S - passed_s))
    await manager.sync(ledger_id)  # else a lagging follower may return the old metadata
    verdict = None
    for _ in range(LOOKS_MAX):
        verdict = await _look(executor, ledger_id, since)
        if verdict is None or not verdict.seems_wrong:
            return verdict
        await manager.sync(ledger_id)
        if await _version(executor, ledger_id) == verdict.metadata_version:
            return verdict
    assert verdict is not None
    return replace(verdict, grade=Grade.UNKNOWN, rests_on_unknown=True)


async def _look(
    executor: Executor, ledger_id: int, since: LedgerVerdict | None
) -> LedgerVerdict | None:
    try:
        versioned = await executor.manager.find(ledger_id)
    except (CorruptionError, UnauthorizedError) as error:
        return _unreadable(ledger_id, error, checked_ms=executor.clock.wall_ms())
    if versioned is None:
        return None
    try:
        return await executor.copies.look(versioned, since)
    except BookmenderError:
        raise
    except Exception as error:  # an unexpected error must not stop the check of other ledgers
        log.exception("fsck_inspection.crashed", ledger_id=ledger_id)
        return _crashed(versioned, error, checked_ms=executor.clock.wall_ms())


def _crashed(versioned: VersionedMetadata, error: Exception, *, checked_ms: int) -> LedgerVerdict:
    finding = Finding.NOT_ANSWERED
    told = f"the look at it failed, for a reason that nobody foresaw: {error!r}"
    return LedgerVerdict(
        ledger_id=versioned.ledger_id,
        grade=Grade.UNKNOWN,
        findings=(finding,),
        rests_on_unknown=True,
        evidence=(Evidence(finding=finding, code="look_failed", detail=told),),
        state=versioned.metadata.state.name.lower(),
        metadata_version=versioned.version,
        mtime_ms=versioned.stat.mtime_ms,
        checked_ms=checked_ms,
    )


async def _version(executor: Executor, ledger_id: int) -> int | None:
    """Return the metadata's version as in a verdict: -1 if it cannot be read. None if the ledger is
    deleted."""
    try:
        versioned = await executor.manager.find(ledger_id)
    except (CorruptionError, UnauthorizedError):
        return -1
    return None if versioned is None else versioned.version


def _unreadable(
    ledger_id: int, error: CorruptionError | UnauthorizedError, *, checked_ms: int
) -> LedgerVerdict:
    finding = Finding.UNREADABLE_METADATA
    code = "corrupt" if isinstance(error, CorruptionError) else "unauthorized"
    return LedgerVerdict(
        ledger_id=ledger_id,
        grade=Grade.UNKNOWN,
        findings=(finding,),
        rests_on_unknown=True,
        evidence=(Evidence(finding=finding, code=code, detail=str(error)),),
        checked_ms=checked_ms,
    )


# --- Many at once ------------------------------------------------------------------------------------


async def _verdicts(
    options: FsckOptions, asked: Iterable[T], look: LookFunction[T], begin_pace: BeginPace
) -> AsyncGenerator[LedgerVerdict, None]:
    """Run the checks in a task of their own, and yield their verdicts.

    The caller may fetch each verdict in another task. Cancel scopes of the session and connections
    must begin and end in one task, so they are never open across a ``yield``.
    """
    done: asyncio.Queue[LedgerVerdict | None] = asyncio.Queue(VERDICTS_WAITING_MAX)

    async def work() -> None:
        try:
            async with open_executor(options, begin_pace) as executor:
                await look_at_all(executor, asked, look, done.put, at_once=_at_once(options))
        finally:
            if not task.cancelling():
                await done.put(None)

    task = asyncio.create_task(work(), name="fsck")  # always ended below
    try:
        while (verdict := await done.get()) is not None:
            yield verdict
        await task
    finally:
        task.cancel()
        await asyncio.wait([task])


def _at_once(options: FsckOptions) -> int:
    return METADATA_AT_ONCE if options.level is Level.METADATA else options.ledgers_at_once


async def look_at_all(
    executor: Executor,
    asked: Iterable[T],
    look: LookFunction[T],
    tell: Callable[[LedgerVerdict], Awaitable[None]],
    *,
    at_once: int,
) -> None:
    """Check ``at_once`` ledgers at a time, and pass each verdict to ``tell``."""
    left = iter(asked)

    async def look_at_some() -> None:
        for each in left:
            verdict = await look(executor, each)
            if verdict is not None:
                await tell(verdict)

    async with task_scope() as scope:
        for running in [scope.start(look_at_some()) for _ in range(at_once)]:
            await running


READS_AT_ONCE = 500

Written = tuple[int, int]
"""Identifies a write to a ledger's metadata: the znode's version and ``mtime_ms``. The version
alone does not: it starts at 0 again if a ledger is deleted and created again."""


async def unchanged(options: FsckOptions, known: Mapping[int, Written]) -> list[int]:
    """Return the ledgers whose metadata is as ``known``, ascending. Opens a session of its own.

    A deleted ledger is left out, and so is one whose ACL denies access. Raises UnavailableError,
    SettingsError.
    """
    async with read_session(options.metadata_service_uri, options.timeouts) as (store, uri):
        manager = await LedgerManager.open(store, uri)

        async def written(ledger_id: int) -> Written | None:
            try:
                stat = await store.exists(manager.path(ledger_id))
            except UnauthorizedError:  # ZooKeeper 3.9.5; the check of the ledger reports it
                return None
            return None if stat is None else (stat.version, stat.mtime_ms)

        ledger_ids = sorted(known)
        now = await gather_in_parts(written, ledger_ids, at_once=READS_AT_ONCE)
        return [i for i, found in zip(ledger_ids, now, strict=True) if found == known[i]]
