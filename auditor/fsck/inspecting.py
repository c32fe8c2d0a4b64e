"""What an executor runs: ledgers looked at, each by itself, and a verdict for each. Writes and
fences nothing.

A second look (``recheck``) at what seemed wrong comes later in the run, at fresh metadata: only
then is it told.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import structlog

from auditor.checks.copies import LOOKS_MAX, SECOND_LOOK_S
from auditor.fsck.executor import Executor, open_executor
from auditor.fsck.levels import FsckOptions, Level
from auditor.fsck.pace import BeginPace, FixedPace
from auditor.fsck.verdicts import Evidence, Finding, Grade, LedgerVerdict
from ledgers.errors import BookmenderError, CorruptionError, UnauthorizedError
from ledgers.manager import VersionedMetadata
from ledgers.operations.tasks import task_scope

METADATA_AT_ONCE = 512
"""Ledgers, where no bookie is asked: as much as ZooKeeper answers at a time."""
VERDICTS_WAITING_MAX = 1_000
"""That nobody has fetched yet."""

log = structlog.get_logger()
T = TypeVar("T")
LookFunction = Callable[[Executor, T], Awaitable[LedgerVerdict | None]]


def inspect(
    options: FsckOptions, ledger_ids: Iterable[int], *, begin_pace: BeginPace = FixedPace
) -> AsyncGenerator[LedgerVerdict, None]:
    """A verdict for each ledger that there is, as they are done; a ledger that is gone yields none.

    In one session of its own, with one connection of a kind to each bookie. Raises
    SessionLostError, UnavailableError (ZooKeeper does not answer), SettingsError (no such cluster):
    then nothing is known of the ledgers that are yet to come. To be closed (``aclosing``) by who
    does not read it to its end.
    """
    return _verdicts(options, ledger_ids, look_at, begin_pace)


def recheck(
    options: FsckOptions, verdicts: Iterable[LedgerVerdict], *, begin_pace: BeginPace = FixedPace
) -> AsyncGenerator[LedgerVerdict, None]:
    """What is to be said instead of verdicts that ``seems_wrong``; as ``inspect``.

    Of open ledgers only what was acknowledged at the first look is expected; they are idle if
    nothing has been written since.
    """
    return _verdicts(options, verdicts, look_again, begin_pace)


async def look_at(executor: Executor, ledger_id: int) -> LedgerVerdict | None:
    """None: it is gone."""
    return await _look(executor, ledger_id, None)


async def look_again(executor: Executor, since: LedgerVerdict) -> LedgerVerdict | None:
    """None: it is gone. The metadata is what it was when its bookies were asked."""
    clock, manager, ledger_id = executor.clock, executor.manager, since.ledger_id
    # Not below 0: the clock of another host, perhaps, was ahead.
    passed_s = max(0.0, (clock.wall_ms() - since.checked_ms) / 1_000)
    await clock.sleep(max(0.0, SECOND_LOOK_S - passed_s))
    await manager.sync(ledger_id)
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
    except Exception as error:  # one ledger's surprise is not to stop the proof of all others
        log.exception("fsck_look.crashed", ledger_id=ledger_id)
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
    """As in a verdict: -1 where it cannot be read. None: it is gone."""
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
    """The work is a task's, with all that belongs to it, so that whoever reads this may do so from
    any task."""
    done: asyncio.Queue[LedgerVerdict | None] = asyncio.Queue(VERDICTS_WAITING_MAX)

    async def work() -> None:
        try:
            async with open_executor(options, begin_pace) as executor:
                await look_at_all(executor, asked, look, done.put, at_once=_at_once(options))
        finally:
            if not task.cancelling():
                await done.put(None)

    task = asyncio.create_task(work(), name="fsck")  # ended below, whatever comes
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
    """So many at a time, whoever is done taking the next."""
    left = iter(asked)

    async def look_at_some() -> None:
        for each in left:
            verdict = await look(executor, each)
            if verdict is not None:
                await tell(verdict)

    async with task_scope() as scope:
        for running in [scope.start(look_at_some()) for _ in range(at_once)]:
            await running
