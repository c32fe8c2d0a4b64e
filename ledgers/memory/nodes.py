"""The znodes of ``store``, and one transaction on them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ledgers.errors import (
    ConflictError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RejectedError,
)
from ledgers.store import (
    ANY_VERSION,
    Check,
    Create,
    Delete,
    Event,
    EventKind,
    Operation,
    OperationResult,
    SetData,
    Stat,
)


@dataclass(slots=True, kw_only=True)
class Node:
    """A znode. ``names`` of its children, in the order they were made."""

    data: bytes = b""
    version: int = 0
    czxid: int = 0
    mzxid: int = 0
    ctime_ms: int = 0
    mtime_ms: int = 0
    ephemeral_owner: int = 0
    names: dict[str, None] = field(default_factory=dict)
    made_count: int = 0
    """Children ever made, sequential or not: the counter of sequential names, as in ZooKeeper."""

    @property
    def stat(self) -> Stat:
        return Stat(
            version=self.version,
            czxid=self.czxid,
            mzxid=self.mzxid,
            ctime_ms=self.ctime_ms,
            mtime_ms=self.mtime_ms,
            ephemeral_owner=self.ephemeral_owner,
            child_count=len(self.names),
        )


class Nodes:
    """All znodes by path."""

    def __init__(self) -> None:
        self._by_path: dict[str, Node] = {"/": Node()}

    def find(self, path: str) -> Node | None:
        assert path == "/" or (path.startswith("/") and not path.endswith("/")), path
        return self._by_path.get(path)

    def __getitem__(self, path: str) -> Node:
        """Raises NoNodeError."""
        node = self.find(path)
        if node is None:
            raise NoNodeError("there is no such znode", path=path)
        return node

    def add(self, path: str, node: Node) -> None:
        parent_path, name = _split(path)
        self[parent_path].names[name] = None
        self._by_path[path] = node

    def remove(self, path: str) -> None:
        parent_path, name = _split(path)
        del self[parent_path].names[name]
        del self._by_path[path]

    def copy(self) -> "Nodes":
        """As it is now, whatever happens to this one."""
        snapshot = Nodes()
        snapshot._by_path = {
            path: replace(node, names=dict(node.names)) for path, node in self._by_path.items()
        }
        return snapshot

    def owned_by(self, session_id: int) -> list[str]:
        return [path for path, node in self._by_path.items() if node.ephemeral_owner == session_id]

    def snapshot(self) -> dict[str, bytes]:
        return {path: node.data for path, node in self._by_path.items()}


class Transaction:
    """Operations applied as they come, until ``undo`` takes all of them back."""

    def __init__(self, nodes: Nodes, *, zxid: int, now_ms: int, session_id: int) -> None:
        self.events: list[Event] = []
        self._nodes = nodes
        self._zxid = zxid
        self._now_ms = now_ms
        self._session_id = session_id
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        for step in reversed(self._undo):
            step()

    def apply(self, operation: Operation) -> OperationResult:
        """Raises the RejectedError that the single call is documented to raise."""
        match operation:
            case Create():
                return self._create(operation)
            case SetData():
                return self._set(operation)
            case Delete():
                self._delete(operation)
            case Check(path=path, version=version):
                self._at_version(path, version)
        return None

    def _create(self, create: Create) -> str:
        parent_path, _ = _split(create.path)
        parent = self._nodes.find(parent_path)
        if parent is None:
            raise NoNodeError("there is no such znode", path=create.path)
        path = f"{create.path}{parent.made_count:010d}" if create.is_sequential else create.path
        if self._nodes.find(path) is not None:
            raise NodeExistsError("there is such a znode already", path=path)
        if parent.ephemeral_owner:
            raise RejectedError("an ephemeral znode has no children", path=path)
        node = Node(
            data=create.data,
            czxid=self._zxid,
            mzxid=self._zxid,
            ctime_ms=self._now_ms,
            mtime_ms=self._now_ms,
            ephemeral_owner=self._session_id if create.is_ephemeral else 0,
        )
        self._nodes.add(path, node)
        parent.made_count += 1

        def undo() -> None:
            self._nodes.remove(path)
            parent.made_count -= 1

        self._undo.append(undo)
        self._happened(EventKind.CREATED, path)
        self._happened(EventKind.CHILDREN, parent_path)
        return path

    def _set(self, change: SetData) -> Stat:
        node = self._at_version(change.path, change.version)
        before = node.data, node.version, node.mzxid, node.mtime_ms

        def undo() -> None:
            node.data, node.version, node.mzxid, node.mtime_ms = before

        self._undo.append(undo)
        node.data, node.version = change.data, node.version + 1
        node.mzxid, node.mtime_ms = self._zxid, self._now_ms
        self._happened(EventKind.CHANGED, change.path)
        return node.stat

    def _delete(self, delete: Delete) -> None:
        node = self._at_version(delete.path, delete.version)
        if node.names:
            raise NotEmptyError("the znode has children", path=delete.path)
        self._nodes.remove(delete.path)
        self._undo.append(lambda: self._nodes.add(delete.path, node))
        self._happened(EventKind.DELETED, delete.path)
        self._happened(EventKind.CHILDREN, _split(delete.path)[0])

    def _at_version(self, path: str, version: int) -> Node:
        node = self._nodes[path]
        if version not in (ANY_VERSION, node.version):
            raise ConflictError("the znode is at another version", path=path, version=version)
        return node

    def _happened(self, kind: EventKind, path: str) -> None:
        self.events.append(Event(kind=kind, path=path, zxid=self._zxid))


def _split(path: str) -> tuple[str, str]:
    """The parent's path, and the name."""
    parent, _, name = path.rpartition("/")
    return parent or "/", name
