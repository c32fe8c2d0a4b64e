"""Many calls, so many at a time; tasks that end with the block that started them; a task that
others wake."""

import asyncio
import math
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")
V = TypeVar("V")


async def gather_in_parts(
    work: Callable[[V], Awaitable[T]], values: Sequence[V], *, at_once: int
) -> list[T]:
    """What ``work`` gives for each of the values, in their order; never for more than so many at a
    time."""
    given: list[T] = []
    for start in range(0, len(values), at_once):
        given += await asyncio.gather(*map(work, values[start : start + at_once]))
    return given


async def wake_on(happenings: AsyncGenerator[object, None], wake: asyncio.Event) -> None:
    """Set ``wake`` at each of them, until they end."""
    async with aclosing(happenings):
        async for _ in happenings:
            wake.set()


async def wait_woken(wake: asyncio.Event, *, timeout_s: float | None) -> bool:
    """Whether ``wake`` is set within that time; None, or infinity: there is no end. It stays
    set."""
    try:
        async with asyncio.timeout(None if timeout_s == math.inf else timeout_s):
            await wake.wait()
    except TimeoutError:
        return False
    return True


class TaskScope:
    """Starts tasks that live no longer than their ``task_scope`` block."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        # In order of their start (a dict, not a set), so that a simulation ends them in that order.
        self._running: dict[asyncio.Task[Any], None] = {}

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._group.create_task(coroutine)
        self._running[task] = None
        task.add_done_callback(self._forget)
        return task

    def cancel(self) -> None:
        for task in list(self._running):
            task.cancel()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        del self._running[task]


@asynccontextmanager
async def task_scope() -> AsyncIterator[TaskScope]:
    """A TaskGroup that cancels what still runs at the block's end, and raises errors unwrapped.

    Asking several bookies for one answer ends with tasks to spare, and its callers sort errors by
    class; with a bare TaskGroup every one of them would have to undo the ExceptionGroup.
    """
    try:
        async with asyncio.TaskGroup() as group:
            scope = TaskScope(group)
            try:
                yield scope
            finally:
                scope.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
