"""What clients and servers say to each other: JSON frames over a WebSocket.

A client says ``hello`` first, and registers after the server's ``welcome``. Fields that a reader
does not know are ignored. Versions and positions are zxids: they stay below 2^53, which JSON can
carry, until ZooKeeper's epoch 2,097,152.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

import msgspec
from msgspec import Struct

from ledgers.errors import CorruptionError, SettingsError

SUBPROTOCOL: Final = "bookmender.notify.v1"
FRAME_BYTES_MAX: Final = 1 << 20
CHANGES_A_FRAME: Final = 2_000
KEYS_A_REGISTER: Final = 2_000
"""So many of the longest keys fit into a frame, also if JSON doubles each character."""
KEYS_MAX: Final = 100_000
"""Objects that one client may register for."""
BEAT_S: Final = 15.0
CLIENT_BEAT_S: Final = 20.0
"""A server and a client say something at least this often. What clients say costs a server most of
its CPU while nothing changes."""
SILENT_S: Final = 45.0
"""A side that hears nothing for so long closes the connection."""
NAME_BYTES_MAX: Final = 200
_DIGEST_MODULUS: Final = 1 << 128

Key = str
"""``L123`` is a ledger, ``Bhost:3181`` a bookie, ``Oname`` a published object."""
LEDGER: Final = "L"
BOOKIE: Final = "B"
OBJECT: Final = "O"
KINDS: Final = (LEDGER, BOOKIE, OBJECT)
Version = int
Positions = dict[str, Version]
"""By kind of object: up to which zxid somebody knows all changes. A missing kind is at 0."""


class Change(Struct, frozen=True, array_like=True, gc=False):
    """The latest version of an object. ``version``: None if it is unknown: read the object."""

    key: Key
    version: Version | None
    is_deleted: bool = False


class Hello(Struct, frozen=True, tag="hello", kw_only=True):
    """The first frame of a client. ``client``: an id that the client chose. ``name``: for
    operators. ``resume``: a resume point as text; None: none."""

    client: str
    name: str = ""
    resume: str | None = None


class Register(Struct, frozen=True, tag="register", kw_only=True):
    """Registrations to add, each with the version that the client knows (0: none), and to remove.

    ``n`` ascends by one with each such frame of a connection. ``is_all``: forget all earlier
    registrations first.
    """

    n: int
    add: list[tuple[Key, Version]] = []
    remove: list[Key] = []
    is_all: bool = False


class Beat(Struct, frozen=True, tag="beat", kw_only=True):
    """The client lives. ``digest``, ``count``: of its registrations, as of frame ``n``. ``n`` is -1
    while an answer is outstanding: then they are not compared."""

    n: int
    digest: str
    count: int


class Welcome(Struct, frozen=True, tag="welcome", kw_only=True):
    """The server accepts a client. ``feed``: as in ``ResumePoint``. ``resync``: the client's resume
    point is of no use here, so everything that the client knew is in doubt. ``urls``: of all living
    servers. ``sent_ms``: when this frame was made, by a clock of the server that never jumps."""

    server: str
    feed: str
    sent_ms: int = 0
    resync: bool = False
    urls: Sequence[str] = ()


class Changes(Struct, frozen=True, tag="changes", kw_only=True):
    """Rule W (see the package). ``n``: None in all frames of an answer but the last. ``age_ms``:
    for how long the server had heard nothing new from its sources at ``sent_ms`` (``Welcome``)."""

    positions: Positions
    n: int | None
    sent_ms: int = 0
    age_ms: int = 0
    changes: list[Change] = []


class Refused(Struct, frozen=True, tag="refused", kw_only=True):
    """These registrations are refused for good. ``code``: ``bad_key`` or ``too_many``."""

    keys: list[Key]
    code: str
    text: str = ""


class Goodbye(Struct, frozen=True, tag="goodbye", kw_only=True):
    """The server closes the connection. ``code``: ``moved``, ``behind``, ``stale``, ``draining``,
    ``slow``, ``digest`` or ``protocol``. The client connects to another server, or to this one
    after ``retry_after_ms``."""

    code: str
    retry_after_ms: int = 0
    text: str = ""


ClientFrame = Hello | Register | Beat
ServerFrame = Welcome | Changes | Refused | Goodbye

_encoder = msgspec.json.Encoder()
_client_frames: msgspec.json.Decoder[ClientFrame] = msgspec.json.Decoder(ClientFrame)
_server_frames: msgspec.json.Decoder[ServerFrame] = msgspec.json.Decoder(ServerFrame)


def encode(frame: ClientFrame | ServerFrame) -> bytes:
    return _encoder.encode(frame)


def decode_client_frame(data: bytes | str) -> ClientFrame:
    """Raises CorruptionError if this is no frame of a client."""
    try:
        return _client_frames.decode(data)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise CorruptionError(f"not a frame of a client: {error}") from error


def decode_server_frame(data: bytes | str) -> ServerFrame:
    """Raises CorruptionError if this is no frame of a server."""
    try:
        return _server_frames.decode(data)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise CorruptionError(f"not a frame of a server: {error}") from error


class ResumePoint(Struct, frozen=True):
    """What a client needs to go on elsewhere. ``feed``: names the cluster and the generation of its
    feed; positions of another feed mean nothing."""

    feed: str
    positions: Positions

    def __str__(self) -> str:
        listed = ",".join(f"{kind}={zxid}" for kind, zxid in sorted(self.positions.items()))
        return f"{self.feed}:{listed}"

    @classmethod
    def parse(cls, text: str) -> ResumePoint | None:
        """Return None if this is none: then everything is unknown, which is never an error."""
        feed, separator, listed = text.rpartition(":")
        try:
            pairs = [part.split("=") for part in listed.split(",") if part]
            positions = {kind: int(zxid) for kind, zxid in pairs}
        except ValueError:
            return None
        return cls(feed, positions) if separator and feed else None


class Digest:
    """A hash of a set of keys that does not depend on their order, so that a change of one key
    costs the same whatever the size of the set: the sum of the keys' hashes modulo 2^128.

    A hash is the first 16 bytes of SHA-256, because each language brings that."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._sum = 0
        self.count = 0
        for key in keys:
            self.add(key)

    def add(self, key: Key) -> None:
        """Add a key that the set does not have."""
        self._sum = (self._sum + _hash(key)) % _DIGEST_MODULUS
        self.count += 1

    def remove(self, key: Key) -> None:
        """Remove a key that the set has."""
        self._sum = (self._sum - _hash(key)) % _DIGEST_MODULUS
        self.count -= 1

    def __str__(self) -> str:
        return f"{self._sum:032x}"


def _hash(key: Key) -> int:
    return int.from_bytes(sha256(key.encode()).digest()[:16])


# --- Keys -----------------------------------------------------------------------------------------


def ledger(ledger_id: int) -> Key:
    return f"{LEDGER}{ledger_id}"


def bookie(bookie_id: str) -> Key:
    return f"{BOOKIE}{bookie_id}"


def published(name: str) -> Key:
    """Return the key of an object that applications publish under this name."""
    return f"{OBJECT}{name}"


def check_key(key: Key) -> Key:
    """Raise SettingsError if no object can have this key."""
    name = key[1:]
    if key[:1] == LEDGER:
        is_number = name.isascii() and name.isdigit() and len(name) < 20
        if is_number and int(name) < 1 << 63 and str(int(name)) == name:
            return key
        raise SettingsError(f"{key[:30]!r} names no ledger. A ledger's key is L and its id: L123")
    if key[:1] not in KINDS:
        raise SettingsError(f"{key!r} begins with none of {', '.join(KINDS)}")
    is_short = 0 < len(name.encode(errors="replace")) <= NAME_BYTES_MAX
    if not is_short or "/" in name or not name.isprintable() or name in (".", ".."):
        raise SettingsError(
            f"{name[:300]!r} names no object: a name has 1 to {NAME_BYTES_MAX} bytes that can be "
            "printed, no slash, and is neither . nor .."
        )
    return key
