"""Watches for kazoo, which knows only those that fire once, and for callbacks (as of 2.11).

A persistent watch (ZooKeeper 3.6, opcode 106) stays until it is removed or the connection ends, and
can cover all znodes below its own. Its events look like any others, so that a client tells by their
paths whose they are: ``WatchingConnection`` hands every one to a listener, with the zxid that its
header has from ZooKeeper 3.9 on (ZOOKEEPER-4655; -1 before), which kazoo does not look at. After a
reconnection the watch is asked for anew; what happened in between is not told. A server before 3.6
knows only those that fire once: one of each kind, asked for anew after each event, tells the same
of a single znode.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import ReplyHeader, Watch, int_struct, write_string


class WatchMode(enum.IntEnum):
    """ZooKeeper's AddWatchMode."""

    PERSISTENT = 0
    PERSISTENT_RECURSIVE = 1


@dataclass(frozen=True, slots=True)
class AddWatch:
    """Request for a persistent watch; asking again for one that stands changes nothing."""

    type: ClassVar[int] = 106

    path: str
    mode: WatchMode

    def serialize(self) -> bytes:
        return bytes(write_string(self.path) + int_struct.pack(self.mode))

    @classmethod
    def deserialize(cls, reply: bytes, offset: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class RemoveWatches:
    """Request to remove all watches of any kind that this connection has on the path itself."""

    type: ClassVar[int] = 18

    path: str

    def serialize(self) -> bytes:
        return bytes(write_string(self.path) + int_struct.pack(_ANY_KIND))

    @classmethod
    def deserialize(cls, reply: bytes, offset: int) -> bool:
        return True


_ANY_KIND = 3
"""ZooKeeper's Watcher.WatcherType.Any."""


class OneShotWatch(enum.IntEnum):
    """What a watch of before 3.6 tells, once. Its value is the opcode of the read that it comes
    with."""

    ZNODE = 3
    """That it is created, changed or deleted (``exists``)."""
    CHILDREN = 8
    """That it has other children, or is deleted (``getChildren``). The znode must be there."""


@dataclass(frozen=True, slots=True)
class AddOneShotWatch:
    """Request for a watch that fires once; asking again for one that stands changes nothing.

    kazoo is not told of it: its own book of watches would grow by those that never fire.
    """

    type: OneShotWatch
    path: str

    def serialize(self) -> bytes:
        return bytes(write_string(self.path) + _AND_WATCH)

    @classmethod
    def deserialize(cls, reply: bytes, offset: int) -> bool:
        return True


_AND_WATCH = b"\1"

EventListener = Callable[[int, str, int], None]
"""Takes the event's type (Watcher.Event.EventType: 1 created, 2 deleted, 3 data, 4 children), path
and zxid."""


class WatchingConnection(ConnectionHandler):  # type: ignore[misc]  # kazoo has no types
    """A connection that tells ``on_event``, on its own thread, of every watch event."""

    def __init__(self, *args: Any, on_event: EventListener, **options: Any) -> None:
        super().__init__(*args, **options)
        self._on_event = on_event

    def _read_watch_event(self, buffer: bytes, offset: int) -> None:
        super()._read_watch_event(buffer, offset)  # for the watches that fire once
        event, _ = Watch.deserialize(buffer, offset)
        header, _ = ReplyHeader.deserialize(buffer, 0)
        self._on_event(event.type, self.client.unchroot(event.path), header.zxid)
