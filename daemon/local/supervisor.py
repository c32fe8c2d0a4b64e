"""The process behind ``local up``: owns the cluster, answers the commands, and ends on ``down``.

It runs detached from the terminal (``start_detached``) or in it (``supervise``). In both cases it
is the parent of the servers, which end with it for any reason. It does one thing at a time: a
command sends one question over a Unix socket and gets one answer (``ask``). The socket is in the
data folder, so the permissions of the folder apply to it.
"""

import enum
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from daemon.local import folder
from daemon.local.cluster import LocalCluster, OnEvent
from daemon.local.spec import Storage, find_bookie
from daemon.local.status import ClusterStatus, observe
from ledgers.errors import BookmenderError, SettingsError, UnavailableError
from ledgers.model import BookieId

END_TIMEOUT_S = 30.0
LOG_NAME = "supervisor.log"
SOCKET_NAME = "control.sock"
SOCKET_PATH_BYTES_MAX = 103
"""The limit of the operating system is 108 bytes with the final zero (Linux), or 104 (macOS)."""
QUESTION_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 240.0
"""Longer than any verb takes: a bookie may wait for the end of its old session before it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The options of ``up``. None: the option of the last start applies, or the default at the
    first start."""

    data: str
    bookies: int | None = None
    bookkeeper: str | None = None
    storage: Storage | None = None
    zookeeper_port: int | None = None
    session_timeout_s: float | None = None
    is_secured: bool = False


class Verb(enum.Enum):
    STATUS = "status"
    KILL = "kill"
    TERMINATE = "terminate"
    START = "start"
    WIPE = "wipe"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request of a command. ``bookie``: the bookie as the user wrote it; empty for verbs that
    concern the whole cluster."""

    verb: Verb
    bookie: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A message of the supervisor: the answer to a question, or news about its start.

    ``refusal``: the question was wrong; ``failure``: the action failed.
    """

    refusal: str = ""
    failure: str = ""
    event: str = ""
    """Only during the start: progress to show."""
    bookie: str = ""
    """The full id of the bookie."""
    was_killed: bool = False
    """True if the bookie did not end after SIGTERM and was killed."""
    status: ClusterStatus | None = None

    @classmethod
    def of_error(cls, error: BookmenderError) -> "Response":
        if isinstance(error, SettingsError):
            return cls(refusal=str(error))
        return cls(failure=str(error))

    def check(self) -> None:
        """Raise SettingsError for a refusal, UnavailableError for a failure."""
        if self.refusal:
            raise SettingsError(self.refusal)
        if self.failure:
            raise UnavailableError(self.failure)


class NotRunningError(SettingsError):
    """No supervisor listens in the data folder."""


# --- The supervisor -------------------------------------------------------------------------------


def supervise(wish: Wish, *, on_event: OnEvent, on_ready: Callable[[ClusterStatus], None]) -> None:
    """Start the cluster and run it until ``down`` or a signal.

    Raises SettingsError and UnavailableError as LocalCluster.start does, and KeyboardInterrupt
    after SIGINT, SIGTERM or SIGHUP.
    """
    data = Path(wish.data)
    _check_folder(data)
    with _signals_unwind(), ExitStack() as running:
        cluster = running.enter_context(
            LocalCluster.start(
                data,
                bookies=wish.bookies,
                bookkeeper=wish.bookkeeper,
                storage=wish.storage,
                zookeeper_port=wish.zookeeper_port,
                session_timeout_s=wish.session_timeout_s,
                is_secured=wish.is_secured,
                on_event=on_event,
            )
        )
        door = running.enter_context(listen(data))
        running.callback((data / SOCKET_NAME).unlink)
        on_ready(observe(cluster))
        last_asker = _serve(cluster, door)
    with last_asker, suppress(OSError):  # the command `down` waits for this, if it still runs
        send(last_asker, Response())


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


def _serve(cluster: LocalCluster, door: socket.socket) -> socket.socket:
    """Answer questions until ``down``. Return its connection, on which the answer is still due."""
    while True:
        connection, _ = door.accept()
        connection.settimeout(QUESTION_TIMEOUT_S)
        try:
            question = msgspec.json.decode(receive(connection), type=Question)
            if question.verb is Verb.DOWN:
                return connection
            send(connection, _answer(cluster, question))
        except (OSError, ValueError, RecursionError) as error:  # it gave up, or is not ours
            print(f"a question was lost: {error}", file=sys.stderr)
        connection.close()


def _answer(cluster: LocalCluster, question: Question) -> Response:
    try:
        if question.verb is Verb.STATUS:
            return Response(status=observe(cluster))
        bookie = find_bookie(cluster.bookies, question.bookie)
        actions: dict[Verb, Callable[[BookieId], object]] = {
            Verb.KILL: cluster.kill,
            Verb.TERMINATE: cluster.terminate,
            Verb.START: cluster.start_bookie,
            Verb.WIPE: cluster.wipe,
        }
        ended = actions[question.verb](bookie)
        return Response(bookie=bookie, was_killed=ended is False)
    except BookmenderError as error:
        return Response.of_error(error)


# --- The connection to it -------------------------------------------------------------------------


def ask(data: Path, verb: Verb, bookie: str = "") -> Response:
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
            send(connection, Question(verb=verb, bookie=bookie))
            answer = msgspec.json.decode(receive(connection), type=Response)
        except (OSError, msgspec.MsgspecError) as error:
            raise UnavailableError(f"the supervisor does not answer: {error}") from error
    answer.check()
    return answer


def listen(data: Path) -> socket.socket:
    """Listen on the socket in the folder. The caller must hold the folder's lock: then a socket
    file that exists belongs to a dead process."""
    path = data / SOCKET_NAME
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def _check_folder(data: Path) -> None:
    """Raise SettingsError if the path of the folder is too long for a Unix socket in it."""
    if len(bytes(data / SOCKET_NAME)) > SOCKET_PATH_BYTES_MAX:
        raise SettingsError(f"the path is too long for a socket below it: {data}")


def send(connection: socket.socket, message: Question | Response) -> None:
    connection.sendall(msgspec.json.encode(message))
    connection.shutdown(socket.SHUT_WR)


def receive(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65_536), b""))


# --- Detached -------------------------------------------------------------------------------------


def start_detached(wish: Wish, *, on_event: OnEvent) -> ClusterStatus:
    """Run ``supervise`` in a separate process. Return the status when every server is ready.

    Raises SettingsError and UnavailableError. Any other end of the wait, such as Ctrl-C, ends the
    supervisor as well. A supervisor that cannot send its news also ends.
    """
    logs = Path(wish.data) / "logs"
    folder.make(logs)
    with (logs / LOG_NAME).open("ab") as log:
        supervisor = subprocess.Popen(
            # -P and PYTHONPATH: run this code, not a folder called "daemon" in the current
            # directory.
            [sys.executable, "-P", "-m", __spec__.name, msgspec.json.encode(wish).decode()],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    try:
        return _follow(supervisor, on_event)
    except BaseException:
        supervisor.terminate()
        try:
            supervisor.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()
        raise


def _follow(supervisor: "subprocess.Popen[bytes]", on_event: OnEvent) -> ClusterStatus:
    assert supervisor.stdout is not None
    with supervisor.stdout as lines:
        for line in lines:
            news = msgspec.json.decode(line, type=Response)
            news.check()
            if news.status is not None:
                return news.status
            on_event(news.event)
    raise UnavailableError(f"the supervisor ended; see {LOG_NAME} among the logs")


def main() -> None:
    """Run a detached supervisor. Its wish is the only argument; it writes its news to standard
    output."""
    wish = msgspec.json.decode(sys.argv[1], type=Wish)
    os.chdir(wish.data)  # so that no other folder is in use

    def on_ready(status: ClusterStatus) -> None:
        _tell(Response(status=status))
        os.dup2(2, 1)  # the pipe is closed: all later output goes to the log

    try:
        supervise(wish, on_event=lambda event: _tell(Response(event=event)), on_ready=on_ready)
    except BookmenderError as error:
        _tell(Response.of_error(error))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(1)
    except OSError as error:  # most likely a full disk
        _tell(Response(failure=f"{error.filename or wish.data}: {error.strerror}"))
        sys.exit(1)


def _tell(news: Response) -> None:
    """Send the news. Raises BrokenPipeError if the process that started this one has ended."""
    os.write(1, msgspec.json.encode(news) + b"\n")


if __name__ == "__main__":
    main()
