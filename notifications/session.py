"""One client, as its server sees it: what it registered for, and what it is still to be told.

What waits for a client is one item an object, the latest, so it never exceeds the registrations.
"""

from __future__ import annotations

from sys import intern
from typing import TYPE_CHECKING, Final

from ledgers.errors import SettingsError
from notifications.protocol import (
    BEAT_S,
    CHANGES_A_FRAME,
    KEYS_MAX,
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

if TYPE_CHECKING:
    from notifications.matcher import Matcher

WAIT_S: Final = 10.0
"""How long a client that is ahead of its server waits for it."""
HELD_MAX: Final = 2 * KEYS_MAX
"""Registrations that wait for the server."""
FRESH_S: Final = 20.0
"""A server that heard from its sources within this time is not the one that is behind."""


class Session:
    """``receive`` takes a frame of the client, ``tick`` returns what to send now."""

    def __init__(self, matcher: Matcher, hello: Hello, now_s: float) -> None:
        self._matcher = matcher
        self.client, self.name = hello.client, hello.name
        self.keys: set[Key] = set()
        self.outbox: dict[Key, Change] = {}
        self.n = 0
        """Of the last registration that was processed."""
        self.is_welcome = False
        self.goodbye: Goodbye | None = None
        self._digest = Digest()
        self._resume = None if hello.resume is None else ResumePoint.parse(hello.resume)
        self._has_resume = hello.resume is not None
        self._since_s = now_s
        """Since when the client waits to be welcomed."""
        self._held_count = 0
        """Bounds ``_held``: its frames and their registrations."""
        self._held: list[tuple[Register, float]] = []
        """Registrations that wait, with the time of their arrival."""
        self._received_n = 0
        self._answered_n = 0
        self._positions: Positions = {}
        """Those of the last complete answer."""
        self._frames: list[ServerFrame] = []
        self._said_s = now_s

    # --- What the client says ---------------------------------------------------------------------

    def receive(self, frame: ClientFrame, now_s: float) -> None:
        match frame:
            case Register() if self.is_welcome and frame.n == self._received_n + 1:
                self._received_n = frame.n
                self._held.append((frame, now_s))
                self._held_count += 1 + len(frame.add) + len(frame.remove)
                if self._held_count > HELD_MAX:
                    self.end(Goodbye(code="protocol", text="too many registrations wait"))
                self._matcher.waiting.add(self)
            case Beat() if self.is_welcome:
                is_same = (frame.digest, frame.count) == (str(self._digest), self._digest.count)
                if frame.n == self.n and not is_same:
                    self.end(Goodbye(code="digest", text="the registrations differ"))
            case _:
                self.end(Goodbye(code="protocol", text="this frame was not expected"))

    def end(self, goodbye: Goodbye) -> None:
        """Send the client away after what was said before."""
        self.goodbye = self.goodbye or goodbye
        self._matcher.dirty.add(self)

    def leave(self) -> None:
        """The connection is gone."""
        self._matcher.close(self)

    # --- What the server says ---------------------------------------------------------------------

    def tick(self, now_s: float) -> list[ServerFrame]:
        """Return the frames to send now. A session with a ``goodbye`` ends after them."""
        if self.goodbye is None:
            if not self.is_welcome:
                self._welcome(now_s)
            while self._held and self._is_due(*self._held[0], now_s):
                self._process(self._held.pop(0)[0])
            self._held_count = self._held_count if self._held else 0
            if not self._held and self.is_welcome:
                self._matcher.waiting.discard(self)
            has_news = self.outbox or self._answered_n != self.n
            if self.is_welcome and (has_news or now_s - self._said_s >= BEAT_S):
                self._answer(now_s)
        if self.goodbye is not None:
            self._frames.append(self.goodbye)
        frames, self._frames = self._frames, []
        if frames:
            self._said_s = now_s
        self._matcher.dirty.discard(self)
        return frames

    def _welcome(self, now_s: float) -> None:
        """Welcome the client once this server knows what the client knows: else a change between
        the two would be told by nobody."""
        matcher, resume = self._matcher, self._resume
        resync = self._has_resume and (resume is None or resume.feed != matcher.feed)
        if resume is not None and not resync and not _reaches(matcher.positions, resume.positions):
            if now_s - self._since_s < WAIT_S:
                return
            if matcher.age_s(now_s) > FRESH_S:
                self.end(Goodbye(code="behind"))
                return
            resync = True  # a server that hears everything is behind by seconds at most
        if resume is not None and not resync:
            self._positions = resume.positions
        self.is_welcome = True
        self._frames.append(
            Welcome(
                server=matcher.server,
                feed=matcher.feed,
                sent_ms=int(now_s * 1000),
                resync=resync,
                urls=matcher.urls,
            )
        )

    def _is_due(self, register: Register, since_s: float, now_s: float) -> bool:
        """Return True if this server knows what the client says to know, or has waited for it."""
        positions = self._matcher.positions
        is_ahead = any(known > positions.get(key[:1], 0) for key, known in register.add)
        return not is_ahead or now_s - since_s >= WAIT_S

    def _process(self, register: Register) -> None:
        if register.is_all:
            self.forget_all()
        for key in register.remove:
            self._remove(key)
        refused: dict[str, list[Key]] = {}
        for key, known in register.add:
            if code := self._refusal(key):
                refused.setdefault(code, []).append(key)
            else:
                self._add(key, known)
        self._frames += [Refused(keys=keys, code=code) for code, keys in refused.items()]
        self.n = register.n

    def _refusal(self, key: Key) -> str:
        try:
            check_key(key)
        except SettingsError:
            return "bad_key"
        is_new = key not in self.keys
        return "too_many" if is_new and len(self.keys) >= KEYS_MAX else ""

    def _add(self, key: Key, known: Version) -> None:
        if key not in self.keys:
            key = intern(key)  # all clients share it in memory
            self.keys.add(key)
            self._digest.add(key)
            self._matcher.hold(key, self)
        table = self._matcher.tables[key[:1]]
        self.outbox.pop(key, None)
        change = Change(key, None) if known > table.position else table.answer(key, known)
        if change is not None:
            self.outbox[key] = change

    def _remove(self, key: Key) -> None:
        if key in self.keys:
            self.keys.discard(key)
            self._digest.remove(key)
            self._matcher.drop(key, self)
        self.outbox.pop(key, None)

    def forget_all(self) -> None:
        for key in self.keys:
            self._matcher.drop(key, self)
        self.keys, self.outbox, self._digest = set(), {}, Digest()

    def _answer(self, now_s: float) -> None:
        """Say everything. Only the last frame says that it was everything (rule W): the connection
        may be lost after any of them."""
        items, self.outbox = list(self.outbox.values()), {}
        while len(items) > CHANGES_A_FRAME:
            part, items = items[:CHANGES_A_FRAME], items[CHANGES_A_FRAME:]
            self._frames.append(Changes(positions=self._positions, n=None, changes=part))
        self._positions, self._answered_n = self._matcher.positions, self.n
        self._frames.append(
            Changes(
                positions=self._positions,
                n=self.n,
                sent_ms=int(now_s * 1000),
                age_ms=int(self._matcher.age_s(now_s) * 1000),
                changes=items,
            )
        )


def _reaches(positions: Positions, resume: Positions) -> bool:
    return all(positions.get(kind, 0) >= zxid for kind, zxid in resume.items())
