"""A ZooKeeper that is too busy for some requests of a session."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from ledgers.errors import UnavailableError, UnknownOutcomeError
from ledgers.store import MetadataStore, Operation, OperationResult
from tests.memory.store import MemoryStore

P = ParamSpec("P")
T = TypeVar("T")

READS = ("get", "exists", "children")


def overload(store: MetadataStore, *paths: str) -> set[str]:
    """Throttle the session's reads of the znodes in the returned set."""
    throttled = set(paths)

    def unless_throttled(read: Callable[[str], Awaitable[T]]) -> Callable[[str], Awaitable[T]]:
        async def reading(path: str) -> T:
            if path in throttled:
                raise UnavailableError("ZooKeeper is overloaded", path=path)
            return await read(path)

        return reading

    for name in READS:
        setattr(store, name, unless_throttled(getattr(store, name)))
    return throttled


@contextmanager
def overloaded(store: MemoryStore, rng: random.Random, *, share: float = 0.3) -> Iterator[None]:
    """Refuse a random share of the session's requests, or lose their replies, during the block."""

    def now_and_then(request: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        async def asking(*args: P.args, **kwargs: P.kwargs) -> T:
            await asyncio.sleep(0)
            if rng.random() < share:
                raise UnavailableError("ZooKeeper is overloaded")
            return await request(*args, **kwargs)

        return asking

    def with_lost_replies(
        multi: Callable[[Sequence[Operation]], Awaitable[list[OperationResult]]],
    ) -> Callable[[Sequence[Operation]], Awaitable[list[OperationResult]]]:
        async def asking(operations: Sequence[Operation]) -> list[OperationResult]:
            is_lost, is_done = rng.random() < share, rng.random() < 0.5
            results = await multi(operations) if is_done or not is_lost else []
            if is_lost:
                raise UnknownOutcomeError("the reply to a write was lost")
            return results

        return asking

    names = (*READS, "sync", "multi")
    asked = {name: getattr(store, name) for name in names}
    for name in names:
        setattr(store, name, now_and_then(getattr(store, name)))
    store.multi = with_lost_replies(store.multi)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        for name, request in asked.items():
            setattr(store, name, request)
