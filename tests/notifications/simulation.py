"""Clients, servers and a cluster in virtual time, for ``test_rule``.

The clients and servers are the real ones but for their connections. Everything happens at random:
changes, deletions, registrations, connections that are cut or fall silent, servers that lag, stop
and begin again, applications that crash, and a ZooKeeper that is restored from a backup.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from notifications.client_state import ClientState, StoredState
from notifications.matcher import Matcher
from notifications.protocol import (
    SILENT_S,
    Change,
    Changes,
    ClientFrame,
    Goodbye,
    Hello,
    Key,
    Positions,
    ServerFrame,
    Version,
    Welcome,
)
from notifications.session import Session
from notifications.versions import VersionTable

KEYS: list[Key] = ["L1", "L2", "L40", "Oa"]
KINDS = ("L", "O")


class World:
    """The cluster: what changed when, by kind."""

    def __init__(self, chance: random.Random) -> None:
        self.is_restored = chance.random() < 0.3
        self.forgets = chance.random() < 0.1 and not self.is_restored
        """Servers forget registrations. What clients store then is of no use."""
        self.is_followed = chance.random() < 0.5
        """Servers mostly know the latest changes. Else they mostly lag, so no client is fresh."""
        self.feed, self.zxid = "cluster:1", 1_000_000
        self.logs: dict[str, list[Change]] = {kind: [] for kind in KINDS}
        self.changed_s: dict[Version, float] = {}
        """When it changed, by zxid."""

    def change(self, chance: random.Random, now_s: float) -> None:
        self.zxid += chance.randint(1, 3)
        self.changed_s[self.zxid] = now_s
        key = chance.choice(KEYS)
        exists = self.version(key) > 0 and not self.last(key).is_deleted
        self.logs[key[0]].append(Change(key, self.zxid, exists and chance.random() < 0.3))

    def restore(self, chance: random.Random) -> None:
        """ZooKeeper is restored from a backup: zxids are handed out a second time."""
        self.zxid -= chance.choice((3, 10, 30))
        self.feed = f"cluster:{int(self.feed.split(':')[1]) + 1}"
        begun = {kind: list({c.key: c for c in log}.values()) for kind, log in self.logs.items()}
        for kind, log in begun.items():
            self.logs[kind] = [Change(c.key, self.zxid, c.is_deleted) for c in log]

    def last(self, key: Key) -> Change:
        changes = [change for change in self.logs[key[0]] if change.key == key]
        return changes[-1] if changes else Change(key, 0)

    def version(self, key: Key) -> Version:
        return self.last(key).version or 0


def missed_change(change: Change, position: Version) -> Change:
    """Return what a source says of a change when it is too late to learn the zxid."""
    return Change(change.key, None, change.is_deleted) if change.is_deleted else change


@dataclass(eq=False)
class Connection:
    """Frames on their way. ``is_silent``: they get lost, and no side is told."""

    server: Server
    session: Session | None = None
    to_server: deque[ClientFrame] = field(default_factory=deque)
    to_client: deque[ServerFrame] = field(default_factory=deque)
    positions: Positions = field(default_factory=dict)
    """Those of the last frame."""
    is_silent: bool = False
    is_lost: bool = False
    heard_s: float = 0.0
    """When the client heard the server."""
    client_heard_s: float = 0.0
    """When the server heard the client."""


class Server:
    def __init__(self, world: World, chance: random.Random, now_s: float) -> None:
        self.world = world
        self.connections: list[Connection] = []
        self.next: dict[str, int] = {}
        self.feed = ""
        self.matcher: Matcher
        self.restart(chance, now_s)

    def restart(self, chance: random.Random, now_s: float) -> None:
        for connection in self.connections:
            connection.is_lost = True
        self.connections = []
        self.matcher = Matcher(server="s", feed=self.world.feed, tables=self._tables(chance))
        self._note_heard(now_s)

    def _tables(self, chance: random.Random) -> list[VersionTable]:
        """Tables as of a base: what was deleted before it is not known."""
        self.feed, tables = self.world.feed, []
        for kind in KINDS:
            log = self.world.logs[kind]
            self.next[kind] = chance.randint(0, len(log))
            table = VersionTable(kind, deleted_max=1)
            table.apply(log[: self.next[kind]], position=0)
            done = log[: self.next[kind]]
            table.position = table.horizon = (done[-1].version or 0) if done else 1
            table._deleted.clear()
            tables.append(table)
        return tables

    def reload(self, chance: random.Random, now_s: float) -> None:
        """Read the tables again, as after a lost session."""
        self.matcher.load(self.world.feed, self._tables(chance), now_s)
        self._note_heard(now_s)

    def _note_heard(self, now_s: float) -> None:
        """A server that lags says so, although it has just loaded its tables."""
        for kind in KINDS:
            is_current = self.next[kind] == len(self.world.logs[kind])
            self.matcher.heard_s[kind] = now_s if is_current else 0.0

    def advance(self, kind: str, chance: random.Random, now_s: float) -> None:
        """Learn the next change of a kind, or, after a gap, how all changes left the objects."""
        if self.feed != self.world.feed:
            self.reload(chance, now_s)
        log = self.world.logs[kind]
        if self.next[kind] < len(log):
            is_gap = chance.random() < 0.2
            missed = log[self.next[kind] :] if is_gap else [log[self.next[kind]]]
            self.next[kind] += len(missed)
            position = missed[-1].version
            assert position is not None
            changes = list({change.key: change for change in missed}.values())
            if is_gap:
                changes = [missed_change(change, position) for change in changes]
            is_current = self.next[kind] == len(log)
            self.matcher.apply(kind, changes, position=position, is_current=is_current, now_s=now_s)
        else:
            self.matcher.heard_s[kind] = now_s

    def catch_up(self, chance: random.Random, now_s: float) -> None:
        for kind in KINDS:
            for _ in range(len(self.world.logs[kind]) + 1):
                self.advance(kind, chance, now_s)

    def step(self, connection: Connection, now_s: float) -> None:
        """Read what has arrived, and say what there is to say."""
        if connection.is_lost:
            self.close(connection)
            return
        while connection.to_server:
            frame = connection.to_server.popleft()
            connection.client_heard_s = now_s
            if isinstance(frame, Hello):
                connection.session = self.matcher.open(frame, now_s)
            elif connection.session is not None:
                connection.session.receive(frame, now_s)
        if connection.session is not None:
            is_bounded = len(connection.session.outbox) <= len(connection.session.keys)
            assert is_bounded, "more waits for a client than it registered for"
            frames = connection.session.tick(now_s)
            if not connection.is_silent:
                connection.to_client.extend(frames)
            if connection.session.goodbye or now_s - connection.client_heard_s > SILENT_S:
                self.close(connection)

    def forget_one(self, chance: random.Random) -> None:
        """Forget a registration, by a mistake that the digest must show."""
        sessions = [each for each in self.matcher.sessions if each.keys]
        if sessions:
            session = chance.choice(sorted(sessions, key=lambda each: each.n))
            session._remove(chance.choice(sorted(session.keys)))

    def close(self, connection: Connection) -> None:
        if connection in self.connections:
            self.connections.remove(connection)
        if connection.session is not None:
            self.matcher.close(connection.session)
            connection.session, connection.is_lost = None, not connection.is_silent


class Application:
    """An application with its library. Its copies and its stored state survive a crash."""

    def __init__(self, world: World, now_s: float) -> None:
        self.world = world
        self.copies: dict[Key, tuple[str, Version]] = {}
        """The feed and the zxid at which each object was read."""
        self.wanted: list[Key] = []
        self.stored: StoredState | None = None
        self.state: ClientState
        self.connection: Connection | None = None
        self.given: list[Change] = []
        self.told: dict[tuple[str, Key], Version] = {}
        self.begun_s = 0.0
        self.begin(now_s)

    def begin(self, now_s: float) -> None:
        self.disconnect()
        self.given, self.told, self.begun_s = [], {}, now_s
        self.state = ClientState(client="c", stored=self.stored, now_s=now_s)
        for key in self.wanted:
            self.state.register(key, self.known(key))

    def known(self, key: Key) -> Version:
        """What an application says to know must be of this feed, so in histories with a restore it
        says nothing."""
        return 0 if self.world.is_restored else self.copies.get(key, ("", 0))[1]

    def register(self, key: Key) -> None:
        if key not in self.wanted:
            self.wanted.append(key)
            self.state.register(key, self.known(key))

    def unregister(self, key: Key) -> None:
        if key in self.wanted:
            self.wanted.remove(key)
            self.state.unregister(key)
            self.told = {told: version for told, version in self.told.items() if told[1] != key}

    def connect(self, server: Server, now_s: float) -> None:
        self.disconnect()
        self.connection = connection = Connection(server, heard_s=now_s, client_heard_s=now_s)
        server.connections.append(connection)
        connection.to_server.append(self.state.connected(now_s))

    def disconnect(self) -> None:
        if self.connection is not None:
            self.connection.is_lost, self.connection = True, None

    def step(self, now_s: float) -> None:
        """Receive one frame, and send what there is to send."""
        if (connection := self.connection) is None:
            return
        if connection.to_client:
            frame = connection.to_client.popleft()
            connection.heard_s = now_s
            if isinstance(frame, Changes):
                before, connection.positions = connection.positions, frame.positions
                is_lower = any(frame.positions[kind] < zxid for kind, zxid in before.items())
                assert not is_lower, "the positions of a connection fell"
            self.state.receive(frame, now_s)
            if isinstance(frame, Welcome) and frame.resync:
                self.told = {}
            if isinstance(frame, Goodbye):
                self.disconnect()
                return
        is_read = not (self.world.forgets and connection.to_client)
        if (connection.is_lost and is_read) or now_s - connection.heard_s > SILENT_S:
            self.disconnect()
            return
        frames = self.state.frames(now_s)
        if not connection.is_silent:
            connection.to_server.extend(frames)

    def take(self) -> None:
        """Begin with the next item."""
        item = self.state.next_item()
        if isinstance(item, Change):
            feed = self.state._feed or ""
            if item.version is not None:
                assert item.version > self.told.get((feed, item.key), 0), "told an older version"
                self.told[feed, item.key] = item.version
            self.given.append(item)

    def finish(self, chance: random.Random) -> None:
        """Read one object, and say that this is done. What is read may be as old as the version."""
        if self.given:
            change = self.given.pop(chance.randrange(len(self.given)))
            feed, version = self.world.feed, self.world.zxid
            if change.version is not None:
                feed, version = self.state._feed or feed, change.version
            copy_feed, copied = self.copies.get(change.key, ("", 0))
            if feed != copy_feed or version > copied:
                self.copies[change.key] = (feed, version)
            self.state.done(change)

    def save(self) -> None:
        if not self.world.forgets and (stored := self.state.stored()) is not None:
            self.stored = stored

    def check_fresh(self) -> None:
        """Up to the moment that the library claims, the application knows each change, or reads the
        object next."""
        state, fresh_s = self.state, self.state._fresh_s
        if fresh_s <= self.begun_s or self.world.is_restored or self.world.forgets:
            return
        for key in state._confirmed:
            version = self.world.version(key)
            known = max(state._told.get(key, 0), self.copies.get(key, ("", 0))[1])
            is_told = known >= version or key in state._outstanding
            is_later = self.world.changed_s.get(version, 0.0) > fresh_s
            assert is_told or is_later, "fresh, though a change was not told"

    def is_current(self, key: Key) -> bool:
        feed, version = self.copies.get(key, ("", 0))
        return feed == self.world.feed and version >= self.world.version(key)


class Simulation:
    """``run`` plays one random history and returns what is wrong at its end; empty: nothing."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_s = 1_000.0
        self.world = World(self.chance)
        self.pause_s = 0 if self.world.forgets else self.chance.choice((0, 1, 12))
        self.weights = [weight * self.chance.choice((0.3, 1, 3)) for weight in ACTIONS]
        for _ in range(self.chance.randint(0, 5)):
            self.world.change(self.chance, self.now_s)
        self.servers = [Server(self.world, self.chance, self.now_s) for _ in range(3)]
        self.applications = [Application(self.world, self.now_s) for _ in range(2)]

    def run(self) -> str:
        try:
            for _ in range(self.chance.randint(50, 300)):
                self.now_s += self.chance.choice((0, 0.02, 0.02, 0.1, 0.1, 1, 1, self.pause_s))
                self._act()
                for application in self.applications:
                    application.check_fresh()
            return self._settle()
        except AssertionError as error:
            return str(error)

    def _act(self) -> None:
        chance, now_s = self.chance, self.now_s
        application, server = chance.choice(self.applications), chance.choice(self.servers)
        connection = application.connection
        match chance.choices(range(17), self.weights)[0]:
            # A connection that ends before the next beat hides what its server forgot.
            case 9 | 12 | 13 | 15 if self.world.forgets:
                pass
            case 0:
                self.world.change(chance, now_s)
            case 1:
                if self.world.is_followed:
                    server.catch_up(chance, now_s)
                else:
                    server.advance(chance.choice(KINDS), chance, now_s)
            case 2:
                if connection is not None:
                    connection.server.step(connection, now_s)
            case 3:
                application.step(now_s)
            case 4:
                application.take()
            case 5:
                application.finish(chance)
            case 6:
                application.register(chance.choice(KEYS))
            case 7:
                application.unregister(chance.choice(KEYS))
            case 8:
                if connection is None or (chance.random() < 0.2 and not self.world.forgets):
                    application.connect(server, now_s)
            case 9:
                application.disconnect()
            case 10:
                application.save()
            case 11:
                application.begin(now_s)
            case 12:
                server.restart(chance, now_s)
            case 13:
                if connection is not None:
                    connection.is_silent = True
            case 14:
                if self.world.is_restored:
                    self.world.restore(chance)
            case 15:
                server.reload(chance, now_s)
            case 16:
                if self.world.forgets:
                    server.forget_one(chance)

    def _settle(self) -> str:
        """Let everything work again, for 120 s."""
        for _ in range(60):
            self.now_s += 2.0
            for server in self.servers:
                server.catch_up(self.chance, self.now_s)
            for application in self.applications:
                if application.connection is None:
                    application.connect(self.chance.choice(self.servers), self.now_s)
                for _ in range(8):
                    if application.connection is not None:
                        connection = application.connection
                        connection.server.step(connection, self.now_s)
                    application.step(self.now_s)
                    application.take()
                    application.finish(self.chance)
        for application in self.applications:
            for key in application.wanted:
                if not application.is_current(key):
                    return f"{key} is out of date and its client was not told"
                last = application.connection
                session = None if last is None else last.session
                if session is None or key not in session.keys:
                    return f"the registration of {key} is lost"
            if application.state.stale_s(self.now_s) is not None:
                return "a client is stale though everything works"
        return ""


ACTIONS = (8, 12, 25, 25, 6, 6, 6, 2, 6, 2, 4, 2, 1, 1, 1, 1, 1)
"""Weights of the actions, in the order of ``_act``."""
