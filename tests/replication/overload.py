"""A ZooKeeper that has no time for some reads of a session."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from ledgers.errors import UnavailableError
from ledgers.store import MetadataStore

T = TypeVar("T")


def overload(store: MetadataStore, *paths: str) -> set[str]:
    """It throttles the session's reads of these znodes, as long as they are in the set that is given."""
    throttled = set(paths)

    def unless_throttled(read: Callable[[str], Awaitable[T]]) -> Callable[[str], Awaitable[T]]:
        async def reading(path: str) -> T:
            if path in throttled:
                raise UnavailableError("ZooKeeper is overloaded", path=path)
            return await read(path)

        return reading

    for name in ("get", "exists", "children"):
        setattr(store, name, unless_throttled(getattr(store, name)))
    return throttled
