"""``bookmender feed follow``: prints each changed ledger, or runs a command for it.

``Follower`` handles one change at a time, oldest first, and submits the receipt after the change
was handled. So after a crash the next run is given it again. A ledger that changes several times
while it waits is handled once.

A command that fails leaves a negative receipt with the last line of its standard error, and the
next change follows. ``bookmender feed clients NAME --retry`` orders another try, which a running
follower makes within RETRY_CHECK_S.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import select
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

import click
import msgspec

from checkpoints.client import (
    IN_ZOOKEEPER,
    ClientProcess,
    ClusterConnection,
    FeedClient,
    open_client_in,
)
from checkpoints.errors import FeedChangedError
from checkpoints.model import CommittedVersion, Key, Version, ledger_id_of
from checkpoints.recovery import LiftReason, Missed, RecoveryService, WatermarkLift
from daemon.admin_session import AdminSession, in_each_session
from daemon.answers import Answer
from daemon.cli.feed import client_store_option
from daemon.cli.main import EXIT_FAILED, EXIT_FENCED, config_option, output_option
from daemon.cli.session import run_with, settings_for_command
from daemon.logs import set_up_logs
from daemon.operations.feed import connection_of
from daemon.words import counted, printable
from ledgers.errors import (
    BookmenderError,
    ClientDeletedError,
    ClientFencedError,
    CorruptionError,
    QuotaError,
    SettingsError,
    UnavailableError,
)
from ledgers.secret import Secret
from ledgers.tasks import task_scope

RETRY_CHECK_S: Final = 5.0
"""Interval at which a follower reads which failures it is to try again."""
READER_CHECK_S: Final = 1.0
"""Interval of the checks whether standard output still has a reader."""
RECONNECT_S: Final = 5.0
"""Wait before the feed is opened again, for example when a checkpoint is missing."""
WAITING_MAX: Final = 10_000
"""Changes that wait for the command. The feed waits beyond it."""
COMMAND_END_S: Final = 5.0
"""After Ctrl-C a command has this long to end before it is killed."""
COMMAND_CHECK_S: Final = 0.1
"""Interval of the checks whether processes of a command are left after Ctrl-C."""
LAST_WORDS_S: Final = 1.0
"""After a command ended, its standard error is read for this long at most. A process that the
command left running may keep it open."""
REASON_UNKNOWN: Final = "nothing on standard error"

Tell = Callable[[str], None]
"""Shows a sentence to the user."""


class Change(Answer, frozen=True, kw_only=True):
    """A changed ledger."""

    ledger_id: int
    is_deleted: bool
    version: Version
    time_ms: int | None
    """When the leader published it; ``null`` on another try after a failure."""

    def to_line(self) -> str:
        return json.dumps(msgspec.to_builtins(self))

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a command."""
        return {
            "LEDGER_ID": str(self.ledger_id),
            "LEDGER_DELETED": str(int(self.is_deleted)),
            "LEDGER_VERSION": str(self.version),
            "LEDGER_TIME_MS": "" if self.time_ms is None else str(self.time_ms),
        }

    def to_text(self) -> str:
        when = "-" * 20
        if self.time_ms is not None:
            moment = datetime.fromtimestamp(self.time_ms / 1000, UTC)
            when = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        what = "deleted" if self.is_deleted else "changed"
        return f"{when}  {what}  ledger {self.ledger_id}  version {self.version:#x}"


class Shown(Protocol):
    """A change that is printed, or given to a command."""

    def to_line(self) -> str: ...

    def to_text(self) -> str: ...

    def variables(self) -> dict[str, str]: ...


Handle = Callable[[Any], Coroutine[Any, Any, str | None]]
"""Handles a change. Returns None after success, or why it failed."""


class HandlingFailedError(BookmenderError):
    """A change could not be handled, and ``--stop-on-failure`` was given."""


class Follower:
    """Receives changes, and handles them one after the other.

    ``failed``: the ledgers that failed and were not handled later. It is the caller's, and kept up
    to date.
    """

    def __init__(
        self,
        service: RecoveryService,
        handle: Handle,
        options: FollowOptions,
        *,
        tell: Tell,
        failed: set[Key],
    ) -> None:
        self._service, self._handle, self._options, self._tell = service, handle, options, tell
        self._failed = failed
        self._has_told_failures = False
        self._waiting: dict[Key, CommittedVersion] = {}
        """The latest version of each object that waits, oldest first."""
        self._is_running = False
        self._wake = asyncio.Event()
        self._room = asyncio.Event()

    async def receive(self, committed: CommittedVersion) -> None:
        """Queue a change. Called by the service."""
        while self._is_running and len(self._waiting) >= WAITING_MAX:
            self._room.clear()
            await self._room.wait()
        waiting = self._waiting.get(committed.key)
        if waiting is not None and waiting.version > committed.version:
            return  # a retried failure: it waited for room, and a later change came first
        self._waiting.pop(committed.key, None)  # the later version goes to the end
        self._waiting[committed.key] = committed
        self._wake.set()

    async def run(self, missed: Missed, *, once: bool = False) -> None:
        """Handle what was missed, then what is received, until cancelled. ``once``: until nothing
        lacks a receipt."""
        self._is_running = True
        for committed in missed:
            await self._process(committed)
        while True:
            self._wake.clear()
            while self._waiting:
                committed = self._waiting.pop(next(iter(self._waiting)))
                self._room.set()
                await self._process(committed)
            if once and not self._service.pending_count:
                return
            await self._wake.wait()

    async def _process(self, committed: CommittedVersion) -> None:
        ledger_id = ledger_id_of(committed.key)
        because = None
        if ledger_id is not None:  # objects of other kinds are acknowledged
            change = Change(
                ledger_id=ledger_id,
                is_deleted=committed.is_deleted,
                version=committed.version,
                time_ms=committed.time_ms,
            )
            because = await self._handle(change)
        if because is None:
            self._service.submit_receipt(committed.key, committed.version)
            self._failed.discard(committed.key)
            return
        if self._options.stop_on_failure:
            raise HandlingFailedError(
                f"ledger {ledger_id} could not be handled: {because}. Another run is given it again"
            )
        self._tell(f"ledger {ledger_id} failed: {printable(because)}")
        await self._service.submit_failure(committed.key, committed.version, because)
        self._failed.add(committed.key)
        if not self._has_told_failures:
            self._has_told_failures = True
            name = printable(self._options.name)
            self._tell(
                f"It is recorded as failed, and the next ledger follows. To list failed ledgers: "
                f"bookmender feed clients {name}. To try them again, add --retry."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOptions:
    """``store``: the URL of the store of receipts. ``once``: end when nothing lacks a receipt."""

    name: str
    store: Secret[str] = Secret(IN_ZOOKEEPER)
    """A URL, which may contain a password."""
    from_start: bool = False
    once: bool = False
    stop_on_failure: bool = False


@dataclass(frozen=True, slots=True)
class FollowRun:
    """State of the command that outlives a session. ``failed``: the ledgers that failed and were
    not handled later."""

    process: ClientProcess = field(default_factory=ClientProcess)
    failed: set[Key] = field(default_factory=set)


async def follow(
    cluster: ClusterConnection,
    options: FollowOptions,
    handle: Handle,
    *,
    tell: Tell,
    run: FollowRun,
    **parts: Any,
) -> None:
    """Follow the feed over one session. Raises SessionLostError. ``parts``: for
    ``open_client_in``."""

    def tell_disabled() -> None:
        if options.once:
            raise SettingsError("the feed is not enabled. Enable it: bookmender feed enable")
        tell("The feed is not enabled. Enable it: bookmender feed enable. Waiting for it.")

    has_followed, is_changed = False, False
    while True:
        is_followed = False
        try:
            async with open_client_in(
                cluster,
                name=options.name,
                store=options.store.reveal(),
                process=run.process,
                from_end=True,
                from_start=options.from_start,
                on_disabled=tell_disabled,
                **parts,
            ) as client:
                follower = Follower(client.service, handle, options, tell=tell, failed=run.failed)
                missed = await client.service.subscribe(follower)
                is_followed = has_followed = True
                is_changed = False
                for text in begin_texts(options, client, missed):
                    tell(text)
                begun: set[tuple[Key, int]] = set()
                await _retry_ordered(client, begun, tell)
                async with task_scope() as scope:
                    scope.start(_watch_orders(client, begun, tell))
                    await follower.run(missed, once=options.once)
                return
        except FeedChangedError as error:
            if not is_followed and is_changed:
                raise SettingsError(
                    f"the store has receipts of client {printable(options.name)} of a later feed, "
                    "or of another cluster. Give this one another --client name or --store. After "
                    "a restore of ZooKeeper, begin a new feed instead: bookmender feed disable, "
                    "then bookmender feed enable"
                ) from error
            text = printable(str(error))
            told = f"{text[0].upper()}{text[1:]}."
            if error.lost_ledger_id is not None:
                told = (
                    f"Warning: the feed began again, because its ledger {error.lost_ledger_id} was "
                    "lost. Changes may be lost with it. Compare your state with all ledgers."
                )
            tell(told)
            is_changed = not is_followed
            if is_changed:
                await asyncio.sleep(RECONNECT_S)
        except QuotaError as error:
            raise HandlingFailedError(
                f"there are too many failures for ZooKeeper: {printable(str(error))}. Keep the "
                "receipts in a database (--store), or repair the command and start again"
            ) from error
        except (CorruptionError, UnavailableError) as error:
            # After corruption, a checkpoint is missing or unreadable. Reading the log again finds
            # out what is lost.
            is_tried_again = is_followed if isinstance(error, CorruptionError) else has_followed
            if not is_tried_again:
                raise
            what = f"The feed cannot be followed: {printable(str(error))}"
            tell(f"{what}. Next try in {RECONNECT_S:g} s.")
            await asyncio.sleep(RECONNECT_S)


def begin_texts(options: FollowOptions, client: FeedClient, missed: Missed) -> list[str]:
    """Return what the user is told at the begin."""
    name = printable(options.name)
    if client.was_reset:
        texts = [
            f"Client {name} had followed an earlier feed. It begins again: all ledgers follow, but "
            "ledgers that were deleted meanwhile are not told."
        ]
    elif client.was_new and not options.from_start:
        return [f"Client {name} is new. It follows from now on; --from-start gives older changes."]
    else:
        texts = [f"Client {name}: {counted(len(missed), 'changed ledger')} to handle."]
        if options.from_start and not client.was_new:
            texts.append(
                "It goes on where it was: --from-start is for new clients. To begin again, first: "
                f"bookmender feed clients {name} --forget"
            )
    return texts + ([lift_text(missed.lifted)] if missed.lifted else [])


def lift_text(lifted: WatermarkLift) -> str:
    """Return the warning that the client may have missed more than it is told."""
    why = {
        LiftReason.RETENTION: "the log keeps only later ones",
        LiftReason.BOUND: "they are older than the bound of the client",
    }[lifted.because]
    return (
        f"Warning: changes from {lifted.from_id:#x} to {lifted.to_id:#x} are lost for this client, "
        f"because {why}. Compare your state with all ledgers."
    )


async def _retry_ordered(client: FeedClient, begun: set[tuple[Key, int]], tell: Tell) -> None:
    """Queue the failures that an operator wants to be tried again. ``begun``: those that were
    queued before, with their times; another failure has another time."""
    with suppress(UnavailableError):
        failures = await client.store.get_failures()
        ordered = {each.key: each.time_ms for each in failures if each.is_retry_ordered}
        begun &= set(ordered.items())
        new = {key for key, time_ms in ordered.items() if (key, time_ms) not in begun}
        begun |= set(ordered.items())
        if new:
            tell(f"{counted(len(new), 'failed ledger')} to try again.")
            await client.service.retry_failures(new)


async def _watch_orders(client: FeedClient, begun: set[tuple[Key, int]], tell: Tell) -> None:
    """Look for ordered retries, and tell when the feed is disabled."""
    was_enabled = True
    while True:
        await _retry_ordered(client, begun, tell)
        if was_enabled and not client.is_enabled:
            tell("The feed was disabled. To go on: bookmender feed enable.")
        was_enabled = client.is_enabled
        await asyncio.sleep(RETRY_CHECK_S)


# --- What is done with a change -------------------------------------------------------------------


def printing(output: str) -> Handle:
    """Return a function that prints a change, and returns when the line was flushed."""

    async def handle(change: Shown) -> None:
        line = change.to_line() if output == "json" else change.to_text()
        try:
            click.echo(line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from error

    return handle


def running(command: str) -> Handle:
    """Return a function that runs a command of the shell for each change.

    The change is in environment variables, and as JSON on standard input. Standard error is passed
    on; its last line is the reason of a failure.
    """

    async def handle(change: Shown) -> str | None:
        environment = {**os.environ, **change.variables()}
        end = b""  # of what the command wrote to standard error

        async def pass_on(errors: asyncio.StreamReader) -> None:
            nonlocal end
            while block := await errors.read(65_536):
                sys.stderr.buffer.write(block)
                sys.stderr.flush()
                end = (end + block)[-4_096:]

        async with _started(command, environment) as (process, errors), task_scope() as scope:
            copying = scope.start(pass_on(errors))
            assert process.stdin is not None
            with suppress(BrokenPipeError, ConnectionResetError):  # it need not read
                process.stdin.write(change.to_line().encode() + b"\n")
                await process.stdin.drain()
            process.stdin.close()
            code = await process.wait()
            await asyncio.wait({copying}, timeout=LAST_WORDS_S)
        if code == 0:
            return None
        lines = [line.strip() for line in end.decode(errors="replace").splitlines()]
        last_line = next(filter(None, reversed(lines)), REASON_UNKNOWN)
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        return f"{last_line} ({how})"

    return handle


@asynccontextmanager
async def _started(
    command: str, environment: dict[str, str]
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """Start a command, and yield it with its standard error. If the block is left before the
    command ended, end the command and all processes that it started.

    Standard error is a pipe of our own. With asyncio's, ``wait`` would not return while a process
    that the command left running keeps it open.
    """
    errors = asyncio.StreamReader()
    ours, theirs = os.pipe()
    try:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(errors), os.fdopen(ours, "rb", buffering=0)
        )
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_shell(
                command,
                stdin=asyncio.subprocess.PIPE,
                stderr=theirs,
                env=environment,
                process_group=0,
            )
        )
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:  # the command may run already, and have started others
            await _end_group(await starting)
            transport.close()
            raise
    finally:
        os.close(theirs)
    try:
        yield process, errors
    finally:
        try:
            if process.returncode is None:
                await _end_group(process)
        finally:
            transport.close()


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End a command and the processes that it started: with SIGTERM, after COMMAND_END_S with
    SIGKILL."""
    with suppress(ProcessLookupError):  # raised when none is left
        os.killpg(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(COMMAND_END_S):
                while True:
                    await asyncio.sleep(COMMAND_CHECK_S)
                    os.killpg(process.pid, 0)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)


# --- The command ----------------------------------------------------------------------------------


@click.command()
@click.option("--client", "name", required=True, help="Name of this client.")
@client_store_option
@click.option("--exec", "command", help="Shell command to run for each changed ledger.")
@click.option("--from-start", is_flag=True, help="A new client gets everything that the log has.")
@click.option("--once", is_flag=True, help="End when all changes so far are handled.")
@click.option("--stop-on-failure", is_flag=True, help="End when a command fails.")
@config_option
@output_option
def follow_command(
    name: str,
    store: str,
    command: str | None,
    from_start: bool,
    once: bool,
    stop_on_failure: bool,
    config: Path | None,
    output: str,
) -> None:
    """Print changed ledgers, or run a command.

    \b
      bookmender feed follow --client audit -o json
      bookmender feed follow --client backup --exec './backup.sh "$LEDGER_ID"'

    The client misses no change: it acknowledges a ledger after its line was printed or its command
    succeeded. After kill -9 or Ctrl-C the same client goes on where it was; the last ledgers may
    come twice. If several processes have one name, only the latest goes on.

    The command gets LEDGER_ID, LEDGER_DELETED (0 or 1), LEDGER_VERSION and LEDGER_TIME_MS, and the
    same as JSON on standard input. If it fails, the next ledger follows, and bookmender feed
    clients NAME shows it.

    Exit codes: 0 done (--once). 1 a command failed (--once, --stop-on-failure), or receipts are
    unreadable. 2 wrong usage, or the feed is not enabled (--once). 3 ZooKeeper or the store of
    receipts does not answer, there is no cluster, or the disk is full. 4 another process follows
    the feed under this name, or the client was deleted. 130 after Ctrl-C, 143 after SIGTERM.
    """
    if stop_on_failure and command is None:
        raise click.UsageError("--stop-on-failure needs --exec.")
    options = FollowOptions(
        name=name,
        store=Secret(store),
        from_start=from_start,
        once=once,
        stop_on_failure=stop_on_failure,
    )
    handle = printing(output) if command is None else running(command)
    settings = settings_for_command(config)

    run = FollowRun()

    async def act(cluster: AdminSession) -> None:
        # A long run shows what is tried again, such as receipts that cannot be stored.
        set_up_logs(replace(settings.log, level="warning"))
        # It writes tracebacks about lost connections to the database, which are opened again.
        logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
        async with task_scope() as scope:
            if command is None:
                scope.start(watch_reader())
            await in_each_session(
                cluster,
                lambda here: follow(connection_of(here), options, handle, tell=_tell, run=run),
            )

    try:
        run_with(settings, act)
    except (HandlingFailedError, ClientDeletedError, ClientFencedError) as error:
        text, code = printable(str(error)), EXIT_FAILED
        if isinstance(error, ClientDeletedError):
            code = EXIT_FENCED
            text = (
                f"client {printable(name)} was deleted (bookmender feed clients --forget). If it "
                "is started again, it is a new client."
            )
        elif isinstance(error, ClientFencedError):
            code = EXIT_FENCED
            text = (
                f"another process follows the feed as client {printable(name)} now. Each name has "
                "one process: stop the other one, or give this one another --client name."
            )
        _tell(f"bookmender: {text}")
        sys.exit(code)
    if run.failed:
        _tell(f"{counted(len(run.failed), 'ledger')} failed.")
        sys.exit(EXIT_FAILED)


async def watch_reader() -> None:
    """Raise BrokenPipeError after the reader of standard output closed the pipe, as in ``| head
    -1``. A write would tell it too, but the next change may be hours away."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)  # errors are reported always
    except (AttributeError, OSError):  # standard output is closed, or no file
        return
    while True:
        if any(events & select.POLLERR for _, events in poll.poll(0)):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        await asyncio.sleep(READER_CHECK_S)


def _tell(text: str) -> None:
    click.echo(text, err=True)
