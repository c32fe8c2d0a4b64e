"""Which clients are to be told of a change: the tables of versions, and who registered for what.

Everything here is in the memory of one server and may be lost with it. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from notifications.protocol import LEDGER, Change, Goodbye, Hello, Key, Positions, Version
from notifications.session import Session
from notifications.versions import VersionTable


class Matcher:
    """The registrations of a server's clients. ``server``: its id. ``feed``: as in
    ``ResumePoint``."""

    def __init__(self, *, server: str, feed: str, tables: Iterable[VersionTable]) -> None:
        self.server, self.feed = server, feed
        self.tables = {table.kind: table for table in tables}
        self.urls: Sequence[str] = ()
        """Of all servers that live, for clients."""
        self.positions: Positions = {}
        """Replaced, never changed: frames refer to it."""
        self.heard_s = dict.fromkeys(self.tables, 0.0)
        """By kind, when its source last said that it knows everything."""
        self.holders: dict[Key, set[Session]] = {}
        self.sessions: set[Session] = set()
        self.dirty: set[Session] = set()
        """Sessions that have something to say now."""
        self.waiting: set[Session] = set()
        """Sessions that wait until this server has caught up with their clients."""
        self._note_positions()

    def apply(
        self,
        kind: str,
        changes: Iterable[Change],
        *,
        position: Version,
        horizon: Version = 0,
        is_current: bool = True,
        now_s: float,
    ) -> None:
        """Take all changes of one kind up to this position. ``horizon``, ``is_current``: as in
        ``Batch``."""
        changes = list(changes)
        self.tables[kind].apply(changes, position=position, horizon=horizon)
        if is_current:
            self.heard_s[kind] = now_s
        for change in changes:
            if (holders := self.holders.get(change.key)) is not None:
                self._tell(change, holders)
        self._note_positions()

    def load(self, feed: str, tables: Iterable[VersionTable], now_s: float) -> None:
        """Go on with tables that were read again.

        Clients are told what changed since the former position. If that is of another feed, or
        ahead of the tables, they are sent away: when they come back, they are told what they lack.
        """
        former, self.tables = self.tables, {table.kind: table for table in tables}
        is_ahead = any(former[kind].position > self.tables[kind].position for kind in former)
        if feed != self.feed or is_ahead:
            for session in self.sessions:
                session.end(Goodbye(code="moved"))
        else:
            for key, holders in self.holders.items():
                change = self.tables[key[0]].answer(key, former[key[0]].position)
                if change is not None:
                    self._tell(change, holders)
        # Only a checkpoint proves that the feed is fresh: its log can be read while nobody writes.
        heard_s = dict.fromkeys(self.tables, now_s)
        self.feed, self.heard_s = feed, heard_s | {LEDGER: self.heard_s.get(LEDGER, 0.0)}
        self._note_positions()

    def age_s(self, now_s: float) -> float:
        """Return for how long the quietest source has said nothing."""
        return max(0.0, now_s - min(self.heard_s.values()))

    def open(self, hello: Hello, now_s: float) -> Session:
        """Accept a client."""
        session = Session(self, hello, now_s)
        self.sessions.add(session)
        self.waiting.add(session)
        return session

    def close(self, session: Session) -> None:
        """Forget a client."""
        session.forget_all()
        for sessions in (self.sessions, self.waiting, self.dirty):
            sessions.discard(session)

    def hold(self, key: Key, session: Session) -> None:
        self.holders.setdefault(key, set()).add(session)

    def drop(self, key: Key, session: Session) -> None:
        holders = self.holders.get(key)
        if holders is not None:
            holders.discard(session)
            if not holders:
                del self.holders[key]

    def _tell(self, change: Change, holders: Iterable[Session]) -> None:
        for session in holders:
            session.outbox[change.key] = change
            self.dirty.add(session)

    def _note_positions(self) -> None:
        self.positions = {kind: table.position for kind, table in self.tables.items()}
