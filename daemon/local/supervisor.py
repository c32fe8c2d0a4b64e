"""The process behind ``local up``: owns the cluster, answers the commands, and ends on ``down``.

It runs detached from the terminal (``start_detached``) or in it (``supervise``). In both cases it
is the parent of the servers, which end with it for any reason. It does one thing at a time.
"""

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

from daemon.local import control, folder
from daemon.local.cluster import LocalCluster, OnEvent
from daemon.local.control import Question, Response, Verb
from daemon.local.jars import OnProgress
from daemon.local.spec import Storage, find_bookie
from daemon.local.status import ClusterStatus, observe
from ledgers.errors import BookmenderError, SettingsError, UnavailableError
from ledgers.model import BookieId

END_TIMEOUT_S = 30.0
LOG_NAME = "supervisor.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The options of ``up``. None: the saved value, else the default."""

    data: str
    bookies: int | None = None
    bookkeeper: str | None = None
    storage: Storage | None = None
    zookeeper_port: int | None = None
    session_timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """A message from a detached supervisor to the process that started it. One field is set."""

    event: str = ""
    fetched: tuple[int, int | None] | None = None
    ready: ClusterStatus | None = None
    refusal: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Callbacks that report the progress of the start."""

    on_event: OnEvent
    on_fetch: OnProgress
    on_ready: Callable[[ClusterStatus], None]


def supervise(wish: Wish, listener: Listener) -> None:
    """Start the cluster and run it until ``down`` or a signal.

    Raises SettingsError and UnavailableError as LocalCluster.start does, and KeyboardInterrupt
    after SIGINT, SIGTERM or SIGHUP.
    """
    data = Path(wish.data)
    control.check_folder(data)
    with _signals_unwind(), ExitStack() as running:
        cluster = running.enter_context(_start(wish, listener))
        door = running.enter_context(control.listen(data))
        running.callback((data / control.SOCKET_NAME).unlink)
        listener.on_ready(observe(cluster))
        last_asker = _serve(cluster, door)
    with last_asker, suppress(OSError):  # the command `down` waits for this, if it still runs
        control.send(last_asker, Response())


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


def _start(wish: Wish, listener: Listener) -> LocalCluster:
    data = Path(wish.data)
    try:
        return LocalCluster.start(
            data,
            bookies=wish.bookies,
            bookkeeper=wish.bookkeeper,
            storage=wish.storage,
            zookeeper_port=wish.zookeeper_port,
            session_timeout_s=wish.session_timeout_s,
            on_event=listener.on_event,
            on_fetch=listener.on_fetch,
        )
    except folder.TakenError as error:
        if not _runs_without_zookeeper(data):
            raise
        option = folder.data_option(data)
        raise SettingsError(
            f"the cluster on {data} runs without its ZooKeeper, which ended or does not answer; "
            f"`bookmender local down{option}`, then `bookmender local up{option}`, brings it back with its data"
        ) from error


def _runs_without_zookeeper(data: Path) -> bool:
    """Return True if the supervisor in the folder says that ZooKeeper is down; False if no
    supervisor answers."""
    try:
        found = control.ask(data, Question(verb=Verb.STATUS)).status
    except BookmenderError:
        return False
    return found is not None and found.zookeeper.state == "down"


def _serve(cluster: LocalCluster, door: socket.socket) -> socket.socket:
    """Answer questions until ``down``. Return its connection, on which the answer is still due."""
    while True:
        connection, _ = door.accept()
        connection.settimeout(control.QUESTION_TIMEOUT_S)
        try:
            question = msgspec.json.decode(control.receive(connection), type=Question)
            if question.verb is Verb.DOWN:
                return connection
            control.send(connection, _answer(cluster, question))
        except (OSError, msgspec.MsgspecError) as error:  # it gave up, or is not ours
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
    except SettingsError as error:
        return Response(refusal=str(error))
    except BookmenderError as error:
        return Response(failure=str(error))


def start_detached(wish: Wish, listener: Listener) -> None:
    """Run ``supervise`` in a separate process, and return when every server is ready.

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
        _follow(supervisor, listener)
    except BaseException:
        supervisor.terminate()
        try:
            supervisor.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()
        raise


def _follow(supervisor: "subprocess.Popen[bytes]", listener: Listener) -> None:
    assert supervisor.stdout is not None
    with supervisor.stdout as lines:
        for line in lines:
            news = msgspec.json.decode(line, type=News)
            if news.refusal:
                raise SettingsError(news.refusal)
            if news.failure:
                raise UnavailableError(news.failure)
            if news.fetched is not None:
                listener.on_fetch(*news.fetched)
            if news.event:
                listener.on_event(news.event)
            if news.ready is not None:
                listener.on_ready(news.ready)
                return
    raise UnavailableError(f"the supervisor ended; see {LOG_NAME} among the logs")


def main() -> None:
    """Run a detached supervisor. Its wish is the only argument; it writes its news to standard
    output."""
    wish = msgspec.json.decode(sys.argv[1], type=Wish)
    os.chdir(wish.data)  # so that no other folder is in use
    try:
        supervise(
            wish,
            Listener(
                on_event=lambda event: _tell(News(event=event)),
                on_fetch=lambda done, total: _tell(News(fetched=(done, total))),
                on_ready=_tell_last,
            ),
        )
    except SettingsError as error:
        _tell(News(refusal=str(error)))
    except BookmenderError as error:
        _tell(News(failure=str(error)))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(1)
    except OSError as error:  # most likely a full disk
        _tell(News(failure=f"{error.filename or wish.data}: {error.strerror}"))
        sys.exit(1)


def _tell(news: News) -> None:
    """Send the news. Raises BrokenPipeError if the process that started this one has ended."""
    os.write(1, msgspec.json.encode(news) + b"\n")


def _tell_last(status: ClusterStatus) -> None:
    _tell(News(ready=status))
    os.dup2(2, 1)  # the pipe is closed: all later output goes to the log


if __name__ == "__main__":
    main()
