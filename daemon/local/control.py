"""The connection between the commands and the supervisor: one question and one answer over a Unix
socket.

The socket is in the data folder, so the permissions of the folder apply to it.
"""

import enum
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec

from daemon.local.status import ClusterStatus
from ledgers.errors import SettingsError, UnavailableError

SOCKET_NAME = "control.sock"
SOCKET_PATH_BYTES_MAX = 103
"""The limit of the operating system is 108 bytes with the final zero (Linux), or 104 (macOS)."""
QUESTION_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 240.0
"""Longer than any verb takes: a bookie may wait for the end of its old session before it starts."""


class Verb(enum.Enum):
    STATUS = "status"
    KILL = "kill"
    TERMINATE = "terminate"
    START = "start"
    WIPE = "wipe"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request of a command. ``bookie``: as the user wrote it; only for verbs that need a
    bookie."""

    verb: Verb
    bookie: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The answer of the supervisor. ``refusal``: the question was wrong; ``failure``: the action
    failed. Both are empty after a success."""

    refusal: str = ""
    failure: str = ""
    bookie: str = ""
    """The full id of the bookie."""
    was_killed: bool = False
    """True if the bookie did not end after SIGTERM and was killed."""
    status: ClusterStatus | None = None


def listen(data: Path) -> socket.socket:
    """Listen on the socket in the folder. The caller must hold the folder's lock: then a socket
    file that exists belongs to a dead process."""
    path = data / SOCKET_NAME
    check_folder(data)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def check_folder(data: Path) -> None:
    """Raise SettingsError if the path of the folder is too long for a Unix socket in it."""
    if len(bytes(data / SOCKET_NAME)) > SOCKET_PATH_BYTES_MAX:
        raise SettingsError(f"the path is too long for a socket below it: {data}")


class NotRunningError(SettingsError):
    """No supervisor listens in the data folder."""


def ask(data: Path, question: Question) -> Response:
    """Ask the question and return the answer of a success.

    Raises NotRunningError, SettingsError if the question was refused, UnavailableError if the
    action failed.
    """
    answer = _exchange(data, question)
    if answer.refusal:
        raise SettingsError(answer.refusal)
    if answer.failure:
        raise UnavailableError(answer.failure)
    return answer


def _exchange(data: Path, question: Question) -> Response:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.connect(str(data / SOCKET_NAME))
        except OSError as error:
            raise NotRunningError(f"no cluster is running on {data}") from error
        try:
            send(connection, question)
            return msgspec.json.decode(receive(connection), type=Response)
        except (OSError, msgspec.MsgspecError) as error:
            raise UnavailableError(f"the supervisor does not answer: {error}") from error


def send(connection: socket.socket, message: Question | Response) -> None:
    connection.sendall(msgspec.json.encode(message))
    connection.shutdown(socket.SHUT_WR)


def receive(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65_536), b""))
