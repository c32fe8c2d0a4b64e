"""From another thread to the loop, with one wake-up for many messages."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


class Inbox:
    """Calls that other threads want made on the loop, in the order they were posted.

    ``call_soon_threadsafe`` costs a system call and a handle each; here only the first of those
    that wait pays that.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_woken = False

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """For any thread. What is posted once the loop is closed is dropped."""
        self._calls.append((function, args))
        if not self._is_woken:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._run_all)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise

    def _run_all(self) -> None:
        self._is_woken = False  # before the look at the calls: what comes after it wakes us again
        while self._calls:
            function, args = self._calls.popleft()
            try:
                function(*args)
            except Exception as error:  # one bad call must not swallow those behind it
                self._loop.call_exception_handler(
                    {"message": f"{function!r} failed", "exception": error}
                )
