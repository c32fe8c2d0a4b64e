"""The process behind ``local up``: owns the cluster, answers the commands, and ends on ``down``.

It runs in the terminal (``supervise``) or as a forked process of its own session
(``start_detached``). In both cases it is the parent of the servers, which end with it for any
reason. It does one thing at a time: a command sends one question over a Unix socket and gets one
answer (``ask``). The socket is in the data folder, so the permissions of the folder apply to it.
"""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from daemon.answers import Answer
from daemon.local import folder
from daemon.local.cluster import LocalCluster, OnEvent
from daemon.local.spec import find_bookie
from daemon.local.status import ClusterStatus, status_of
from ledgers.errors import BookmenderError, SettingsError, UnavailableError

LOG_NAME = "supervisor.log"
SOCKET_NAME = "control.sock"
SOCKET_PATH_BYTES_MAX = 103
"""The limit of the operating system is 108 bytes with the final zero (Linux), or 104 (macOS)."""
QUESTION_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 240.0
"""Longer than any verb takes: a bookie may wait for the end of its old session before it starts."""
STAYS = "it stays registered until its session expires"

Verb = Literal["status", "kill", "stop", "start", "wipe", "down"]
Question = tuple[Verb, str]
"""What a command asks for, and the bookie as the user wrote it (empty: the whole cluster)."""


class Reply(Answer, frozen=True, kw_only=True):
    """A message of the supervisor: the answer to a question, or news about its start.

    ``refusal``: the question was wrong; ``failure``: the action failed; ``text``: what was done,
    for the user.
    """

    refusal: str = ""
    failure: str = ""
    text: str = ""
    status: ClusterStatus | None = None

    @classmethod
    def decode(cls, message: bytes) -> "Reply":
        """Raises SettingsError for a refusal, UnavailableError for a failure."""
        reply = msgspec.json.decode(message, type=cls)
        if reply.refusal:
            raise SettingsError(reply.refusal)
        if reply.failure:
            raise UnavailableError(reply.failure)
        return reply


def _reply_of(error: BookmenderError) -> Reply:
    is_refusal = isinstance(error, SettingsError)
    return Reply(refusal=str(error)) if is_refusal else Reply(failure=str(error))


class NotRunningError(SettingsError):
    """No supervisor listens in the data folder."""


def supervise(
    data: Path,
    options: Mapping[str, Any],
    *,
    on_event: OnEvent,
    on_ready: Callable[[ClusterStatus], None],
) -> None:
    """Start the cluster and run it until ``down`` or a signal. ``options``: of
    ``LocalCluster.start``.

    Raises SettingsError and UnavailableError as LocalCluster.start does, and KeyboardInterrupt
    after SIGINT, SIGTERM or SIGHUP.
    """
    path = data / SOCKET_NAME
    if len(bytes(path)) > SOCKET_PATH_BYTES_MAX:
        raise SettingsError(f"the path is too long for a socket below it: {data}")
    with _signals_unwind(), ExitStack() as running:
        cluster = running.enter_context(LocalCluster.start(data, on_event=on_event, **options))
        path.unlink(missing_ok=True)  # of a dead process: this one holds the lock of the folder
        door = running.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(str(path))
        running.callback(path.unlink)
        door.listen()
        on_ready(status_of(cluster.spec, data, cluster))
        last_asker = _serve(cluster, data, door)
    with last_asker, suppress(OSError):  # the command `down` waits for this, if it still runs
        _send(last_asker, Reply(text="stopped"))


@contextmanager
def _signals_unwind() -> Iterator[None]:
    """Turn each signal into KeyboardInterrupt, which stops the cluster while it unwinds.

    If a second signal interrupts that, the servers still die with this process.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    former = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, former, strict=True):
            signal.signal(number, handler)


def _serve(cluster: LocalCluster, data: Path, door: socket.socket) -> socket.socket:
    """Answer questions until ``down``. Return its connection, on which the answer is still due."""
    while True:
        connection, _ = door.accept()
        connection.settimeout(QUESTION_TIMEOUT_S)
        try:
            verb, bookie = msgspec.json.decode(_receive(connection), type=Question)
            if verb == "down":
                return connection
            _send(connection, _answer(cluster, data, verb, bookie))
        except (OSError, ValueError, RecursionError) as error:  # it gave up, or is not ours
            print(f"a question was lost: {error}", file=sys.stderr)
        connection.close()


def _answer(cluster: LocalCluster, data: Path, verb: Verb, name: str) -> Reply:
    try:
        if verb == "status":
            return Reply(status=status_of(cluster.spec, data, cluster))
        bookie = find_bookie(cluster.bookies, name)
        if verb == "kill":
            cluster.kill(bookie)
            return Reply(text=f"killed {bookie}; {STAYS}")
        if verb == "stop":
            if cluster.terminate(bookie):
                return Reply(text=f"stopped {bookie}")
            return Reply(text=f"killed {bookie} because it did not stop in time; {STAYS}")
        if verb == "start":
            cluster.start_bookie(bookie)
            return Reply(text=f"started {bookie}")
        cluster.wipe(bookie)
        return Reply(text=f"wiped {bookie}")
    except BookmenderError as error:
        return _reply_of(error)


def ask(data: Path, verb: Verb, bookie: str = "") -> Reply:
    """Ask the supervisor in the folder and return the answer of a success.

    Raises NotRunningError, SettingsError if the question was refused, UnavailableError if the
    action failed.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.connect(str(data / SOCKET_NAME))
        except OSError as error:
            raise NotRunningError(f"no cluster is running on {data}") from error
        try:
            _send(connection, (verb, bookie))
            return Reply.decode(_receive(connection))
        except (OSError, msgspec.MsgspecError) as error:
            raise UnavailableError(f"the supervisor does not answer: {error}") from error


def _send(connection: socket.socket, message: Question | Reply) -> None:
    connection.sendall(msgspec.json.encode(message))
    connection.shutdown(socket.SHUT_WR)


def _receive(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65_536), b""))


def start_detached(data: Path, options: Mapping[str, Any], *, on_event: OnEvent) -> ClusterStatus:
    """Run ``supervise`` in a process of its own session. Return the status when every server is
    ready.

    Raises SettingsError and UnavailableError. Any other end of the wait, such as Ctrl-C, ends the
    supervisor as well. A supervisor that cannot send its news also ends.
    """
    folder.make(data / "logs")
    receiver, sender = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    supervisor_pid = os.fork()
    if supervisor_pid == 0:
        os.close(receiver)
        _run_detached(data, options, sender)
    os.close(sender)
    try:
        with open(receiver, "rb") as lines:
            for line in lines:
                news = Reply.decode(line)
                if news.status is not None:
                    return news.status
                on_event(news.text)
        raise UnavailableError(f"the supervisor ended; see {LOG_NAME} among the logs")
    except BaseException:
        os.kill(supervisor_pid, signal.SIGTERM)  # not reaped yet, so the id is still its own
        os.waitpid(supervisor_pid, 0)
        raise


def _run_detached(data: Path, options: Mapping[str, Any], sender: int) -> NoReturn:
    """Run the supervisor in a forked process. Its news go to ``sender``, its output to the log."""

    def tell(news: Reply) -> None:  # raises BrokenPipeError if the user's command has ended
        os.write(sender, msgspec.json.encode(news) + b"\n")

    def on_ready(status: ClusterStatus) -> None:
        tell(Reply(status=status))
        os.dup2(2, sender)  # the pipe is closed: all later events go to the log

    try:
        os.setsid()
        os.chdir(data)  # so that no other folder is in use
        log = os.open(data / "logs" / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for own, standard in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(own, standard)
        supervise(data, options, on_event=lambda event: tell(Reply(text=event)), on_ready=on_ready)
    except BookmenderError as error:
        tell(_reply_of(error))
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    except OSError as error:  # most likely a full disk
        tell(Reply(failure=f"{error.filename or data}: {error.strerror}"))
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(0)  # without the exit handlers of the user's command, whose copy this process is
