"""A metadata store that only reads. With it, a bug in an observing program cannot change
anything."""

from collections.abc import AsyncGenerator, Sequence
from typing import NoReturn

from ledgers.store import (
    ANY_VERSION,
    EVENTS_MAX,
    Event,
    MetadataStore,
    Operation,
    OperationResult,
    SessionState,
    Stat,
)


class ReadOnlyStore:
    """The session of another store without writes. Each write raises AssertionError, unsent."""

    def __init__(self, store: MetadataStore) -> None:
        """``store`` is closed together with this store."""
        self._store = store

    @property
    def request_bytes_max(self) -> int:
        return self._store.request_bytes_max

    @property
    def state(self) -> SessionState:
        return self._store.state

    @property
    def session_id(self) -> int:
        return self._store.session_id

    @property
    def request_count(self) -> int:
        return self._store.request_count

    async def wait_lost(self) -> None:
        await self._store.wait_lost()

    async def wait_connected(self) -> None:
        await self._store.wait_connected()

    async def wait_disconnected(self) -> None:
        await self._store.wait_disconnected()

    async def get(self, path: str) -> tuple[bytes, Stat]:
        return await self._store.get(path)

    async def exists(self, path: str) -> Stat | None:
        return await self._store.exists(path)

    async def children(self, path: str) -> list[str]:
        return await self._store.children(path)

    async def sync(self, path: str) -> None:
        await self._store.sync(path)

    def watch(
        self, path: str, *, is_recursive: bool = False, events_max: int = EVENTS_MAX
    ) -> AsyncGenerator[Event, None]:
        return self._store.watch(path, is_recursive=is_recursive, events_max=events_max)

    async def close(self) -> None:
        await self._store.close()

    async def create(
        self,
        path: str,
        data: bytes = b"",
        *,
        is_ephemeral: bool = False,
        is_sequential: bool = False,
        with_parents: bool = False,
    ) -> str:
        _refuse(f"create {path}")

    async def set(self, path: str, data: bytes, *, version: int) -> Stat:
        _refuse(f"set {path}")

    async def delete(self, path: str, *, version: int = ANY_VERSION) -> None:
        _refuse(f"delete {path}")

    async def multi(self, operations: Sequence[Operation]) -> list[OperationResult]:
        """Raise AssertionError, also if all operations are checks: ZooKeeper logs transactions."""
        _refuse(f"multi of {len(operations)}")


def _refuse(what: str) -> NoReturn:
    raise AssertionError(f"a session that only reads was told to write: {what}")
