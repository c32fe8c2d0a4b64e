"""Persistent watches for kazoo, which has only one-shot watches with callbacks (as of 2.11).

A persistent watch (ZooKeeper 3.6, opcode 106) stays until it is removed or the connection ends. It
can also cover all descendants of its znode. Its events do not name their watch, so readers match
them by path. ``WatchingConnection`` gives every event to a listener. It adds the zxid of the header
(ZOOKEEPER-4655: from ZooKeeper 3.9 on; -1 before), which kazoo ignores.

After a reconnection the store registers the watch again; events in between are not reported.
Servers before 3.6 have only one-shot watches. One of each kind, registered again after each event,
covers a single znode as well.
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
    """Request for a persistent watch. Does nothing if the watch is already registered."""

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
    """Request to remove all watches, of any kind, that this connection has on exactly this path."""

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
    """The kinds of one-shot watches. The value is the opcode of the read that registers it."""

    ZNODE = 3
    """Fires when the znode is created, changed or deleted (``exists``)."""
    CHILDREN = 8
    """Fires when the list of children changes or the znode is deleted (``getChildren``). The znode
    must exist."""


@dataclass(frozen=True, slots=True)
class AddOneShotWatch:
    """Request for a one-shot watch. Does nothing if the watch is already registered.

    The watch is not registered in kazoo's own tables, where watches that never fire would pile up.
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
"""Receives the type of an event (Watcher.Event.EventType: 1 created, 2 deleted, 3 data,
4 children), its path and its zxid."""


class WatchingConnection(ConnectionHandler):  # type: ignore[misc]  # kazoo has no types
    """A connection that calls ``on_event``, on kazoo's thread, for every watch event."""

    def __init__(self, *args: Any, on_event: EventListener, **options: Any) -> None:
        super().__init__(*args, **options)
        self._on_event = on_event

    def _read_watch_event(self, buffer: bytes, offset: int) -> None:
        super()._read_watch_event(buffer, offset)  # handles kazoo's own one-shot watches
        event, _ = Watch.deserialize(buffer, offset)
        header, _ = ReplyHeader.deserialize(buffer, 0)
        self._on_event(event.type, self.client.unchroot(event.path), header.zxid)
