"""One client, as its own library sees it: what the application wants, was told and has finished.

``register`` and ``done`` are the application's calls, ``receive`` and ``frames`` the connection's.
No I/O, no clock.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from notifications.protocol import (
    CLIENT_BEAT_S,
    KEYS_A_REGISTER,
    Beat,
    Change,
    Changes,
    ClientFrame,
    Digest,
    Goodbye,
    Hello,
    Key,
    Positions,
    Refused,
    Register,
    ResumePoint,
    ServerFrame,
    Version,
    Welcome,
    check_key,
)

STALE_S: Final = 30.0
"""After so long without news of the sources, what the application knows may be out of date."""
LATE_S: Final = 5.0
"""A frame that seems to be this late may be so, or the server's clock was measured badly. Then the
clock is measured again."""


class Stale(Struct, frozen=True):
    """Changes of the last ``age_s`` seconds, or later ones, may not have been told."""

    age_s: float


class Fresh(Struct, frozen=True):
    """All changes were told again."""


Item = Change | Refused | Stale | Fresh


class StoredState(Struct, frozen=True, kw_only=True):
    """What an application stores for its next start. ``resume``: a resume point as text.
    ``digest``, ``count``: of the registrations that it is valid for."""

    resume: str
    digest: str
    count: int

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, data: bytes) -> StoredState | None:
        """Return None if this is no state: then the application is told everything."""
        try:
            return _stored_state.decode(data)
        except msgspec.MsgspecError:
            return None


_stored_state = msgspec.json.Decoder(StoredState)


class ClientState:
    """The registrations of one client, over all its connections."""

    def __init__(
        self, *, client: str, name: str = "", stored: StoredState | None = None, now_s: float
    ) -> None:
        self._client, self._name = client, name
        self._stored = stored
        self._wanted: dict[Key, Version] = {}
        """With the version that the application knew."""
        self._digest = Digest()
        self._told: dict[Key, Version] = {}
        self._outstanding: dict[Key, Change] = {}
        """What the application has not finished."""
        self._ready: dict[Key, None] = {}
        """What the application has not been given, the first first."""
        self._notes: list[Refused | Stale | Fresh] = []
        self._feed: str | None = None
        self._positions: Positions = {}
        self._confirmed: set[Key] = set()
        """Registrations for which the positions count."""
        self._is_welcome = False
        self._unsent: dict[Key, None] = {}
        self._n = 0
        self._whole_n = 0
        """Of the frame that ended the first registration of all keys on this connection."""
        self._pending: dict[int, set[Key]] = {}
        """Registrations that were sent and not answered, by n."""
        self._said_s = now_s
        self._asked_s: dict[int, float] = {}
        """When registrations were sent that are not answered, by n."""
        self._ahead_s = 0.0
        """By how much this clock is ahead of the server's, at least."""
        self._is_late = False
        """The last complete answer seemed to be late."""
        self._fresh_s = now_s
        """Up to this moment all changes were told, as far as the server knew them."""
        self._is_stale = False

    # --- The application --------------------------------------------------------------------------

    def register(self, key: Key, known: Version = 0) -> None:
        """Want to be told of this object. ``known``: the version that the application has. Does
        nothing if it is registered. Raises SettingsError if no object can have this key."""
        if key in self._wanted:
            return
        self._wanted[check_key(key)] = known
        self._digest.add(key)
        self._unsent[key] = None

    def unregister(self, key: Key) -> None:
        if self._wanted.pop(key, None) is None:
            return
        self._digest.remove(key)
        self._unsent[key] = None
        for keys in (self._confirmed, *self._pending.values()):
            keys.discard(key)  # an answer on its way is none to a later registration
        for told in (self._told, self._outstanding, self._ready):
            told.pop(key, None)

    def next_item(self) -> Item | None:
        """Return what the application is to be told next; None: nothing now. It calls ``done``
        after a change."""
        if self._notes:
            return self._notes.pop(0)
        for key in self._ready:
            del self._ready[key]
            return self._outstanding[key]
        return None

    def done(self, change: Change) -> None:
        """The application has finished with this change."""
        if self._outstanding.get(change.key) is change:
            del self._outstanding[change.key]

    def stored(self) -> StoredState | None:
        """Return what to keep for a restart; None: keep what was kept before.

        The positions are below the version of each item that is not finished: else a crash would
        lose it. An unknown version counts as 0.
        """
        if self._feed is None or self._wanted.keys() != self._confirmed:
            return None
        positions = dict(self._positions)
        for change in self._outstanding.values():
            below = max(0, (change.version or 0) - 1)
            kind = change.key[:1]
            positions[kind] = min(positions.get(kind, 0), below)
        return StoredState(
            resume=str(ResumePoint(self._feed, positions)),
            digest=str(self._digest),
            count=self._digest.count,
        )

    @property
    def positions(self) -> Positions:
        return dict(self._positions)

    def stale_s(self, now_s: float) -> float | None:
        """Return how old the application's knowledge may be; None if it is fresh."""
        age_s = now_s - self._fresh_s
        return age_s if age_s > STALE_S else None

    # --- The connection ---------------------------------------------------------------------------

    def connected(self, now_s: float) -> Hello:
        """Return the first frame of a connection."""
        if (stored := self._stored) is not None:
            self._stored = None
            resume = ResumePoint.parse(stored.resume)
            is_same = (stored.digest, stored.count) == (str(self._digest), self._digest.count)
            if resume is not None and is_same:
                self._feed, self._positions = resume.feed, resume.positions
                self._confirmed = set(self._wanted)
        self._is_welcome, self._n, self._whole_n = False, 0, 0
        self._pending, self._asked_s, self._is_late, self._said_s = {}, {}, False, now_s
        resume = None if self._feed is None else ResumePoint(self._feed, self._positions)
        return Hello(
            client=self._client, name=self._name, resume=None if resume is None else str(resume)
        )

    def receive(self, frame: ServerFrame, now_s: float) -> None:
        match frame:
            case Welcome():
                if frame.resync:
                    self._forget_told()
                self._is_welcome, self._feed = True, frame.feed
                # The server made this frame after the hello, the last that this client has said.
                self._ahead_s = self._said_s - frame.sent_ms / 1000
                self._unsent = {}
            case Changes():
                self._take(frame, now_s)
            case Refused():
                for key in frame.keys:
                    self.unregister(key)
                    self._unsent.pop(key, None)
                self._notes.append(frame)
            case Goodbye(code="digest"):
                # Since an unknown moment the server has told nothing of some registrations.
                self._confirmed = set()
            case _:
                pass
        self.check(now_s)

    def check(self, now_s: float) -> None:
        """Note if what the application knows has become stale or fresh."""
        age_s = self.stale_s(now_s)
        if (age_s is not None) != self._is_stale:
            self._is_stale = age_s is not None
            self._notes.append(Fresh() if age_s is None else Stale(age_s))

    def frames(self, now_s: float) -> list[ClientFrame]:
        """Return what to send now."""
        if not self._is_welcome:
            return []
        frames: list[ClientFrame] = []
        if self._n == 0:
            keys = list(self._wanted)
            for first in range(0, max(1, len(keys)), KEYS_A_REGISTER):
                part = keys[first : first + KEYS_A_REGISTER]
                frames.append(self._registering(part, now_s, is_all=first == 0))
            self._whole_n = self._n
        elif self._unsent:
            keys, self._unsent = list(self._unsent), {}
            for first in range(0, len(keys), KEYS_A_REGISTER):
                frames.append(self._registering(keys[first : first + KEYS_A_REGISTER], now_s))
        elif self._is_late and not self._pending and now_s - self._said_s >= LATE_S:
            # The answer to a registration tells the server's clock.
            frames += [self._beat(), self._registering([], now_s)]
        if not frames and now_s - self._said_s >= CLIENT_BEAT_S:
            frames.append(self._beat())
        if frames:
            self._said_s = now_s
        return frames

    def _beat(self) -> Beat:
        # Before the answer, the client does not know what the server refuses.
        n = -1 if self._pending else self._n
        return Beat(n=n, digest=str(self._digest), count=self._digest.count)

    def _registering(self, keys: list[Key], now_s: float, *, is_all: bool = False) -> Register:
        """Return the frame that tells the server which of these keys are wanted."""
        self._n += 1
        self._asked_s[self._n] = now_s
        add = [(key, self._known(key)) for key in keys if key in self._wanted]
        self._pending[self._n] = {key for key, _ in add}
        remove = [key for key in keys if key not in self._wanted]
        return Register(n=self._n, add=add, remove=remove, is_all=is_all)

    def _known(self, key: Key) -> Version:
        """Return up to which version the application knows this object."""
        known = max(self._wanted[key], self._told.get(key, 0))
        return max(known, self._positions.get(key[:1], 0)) if key in self._confirmed else known

    def _take(self, frame: Changes, now_s: float) -> None:
        for change in frame.changes:
            key, version = change.key, change.version
            if key not in self._wanted:
                continue
            if version is not None:
                if version <= self._told.get(key, 0):
                    continue
                self._told[key] = version
            self._outstanding[key] = change
            self._ready[key] = None
        # Only a complete answer moves the positions. Before the server knows all registrations, no
        # answer is complete: the positions count for keys that it has not heard of.
        if frame.n is None or not 0 < self._whole_n <= frame.n:
            return
        for kind, position in frame.positions.items():
            self._positions[kind] = max(self._positions.get(kind, 0), position)
        for n in [n for n in self._pending if n <= frame.n]:
            self._confirmed |= self._pending.pop(n)
        self._note_fresh(frame, frame.n, now_s)

    def _note_fresh(self, frame: Changes, n: int, now_s: float) -> None:
        """Note up to when a complete answer told everything. It may have waited in the network, so
        what counts is when the server made it: after it had read the registrations up to n."""
        for asked_s in [self._asked_s.pop(each) for each in list(self._asked_s) if each <= n]:
            self._ahead_s = max(self._ahead_s, asked_s - frame.sent_ms / 1000)
        made_s = min(now_s, frame.sent_ms / 1000 + self._ahead_s)  # a paused clock may have lagged
        self._is_late = now_s - made_s > LATE_S
        self._fresh_s = max(self._fresh_s, made_s - frame.age_ms / 1000)

    def _forget_told(self) -> None:
        """What was told has no meaning in another feed: the servers tell everything again."""
        self._wanted = dict.fromkeys(self._wanted, 0)
        self._told, self._positions, self._confirmed = {}, {}, set()
        for key, change in self._outstanding.items():
            self._outstanding[key] = replace(change, version=None)
            self._ready[key] = None
