"""How the commands speak to the supervisor: one question and one answer over a Unix socket.

The socket lies in the data folder, so its permissions are the folder's.
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
"""The systems' own limit is 108 bytes with the final zero (Linux), or 104 (macOS)."""
QUESTION_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 240.0
"""Above all that a verb may take: a bookie that waits for its former session, and then starts."""


class Verb(enum.Enum):
    STATUS = "status"
    KILL = "kill"
    TERMINATE = "terminate"
    START = "start"
    WIPE = "wipe"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """``bookie``: as the user names one; for the verbs that need it."""

    verb: Verb
    bookie: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """``refusal``: it was asked wrongly; ``failure``: it went wrong; both empty when all went
    well."""

    refusal: str = ""
    failure: str = ""
    bookie: str = ""
    """The full id of the bookie that was meant."""
    was_killed: bool = False
    """It was asked to end, and did not."""
    status: ClusterStatus | None = None


def listen(data: Path) -> socket.socket:
    """To be used by whoever holds the folder's lock: a socket found there is a dead one's."""
    path = data / SOCKET_NAME
    check_folder(data)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def check_folder(data: Path) -> None:
    """Raises SettingsError for a folder whose path is too long for a Unix socket in it."""
    if len(bytes(data / SOCKET_NAME)) > SOCKET_PATH_BYTES_MAX:
        raise SettingsError(f"the path is too long for a socket below it: {data}")


class NotRunningError(SettingsError):
    """Nobody listens in the data folder."""


def ask(data: Path, question: Question) -> Response:
    """A good answer. Raises NotRunningError, SettingsError when the question was refused,
    UnavailableError when what was asked for failed.
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
