"""Calls from other threads to the event loop, with one wake-up for many calls."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


class Inbox:
    """A queue of calls that other threads post and the loop runs, in the order of posting.

    Each ``call_soon_threadsafe`` costs a system call and a handle. Here only the first waiting call
    costs one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_woken = False

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Queue a call. May be called on any thread. After the loop is closed, calls are
        dropped."""
        self._calls.append((function, args))
        if not self._is_woken:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._run_all)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise

    def _run_all(self) -> None:
        # Cleared before the queue is read: a call posted after that wakes the loop again.
        self._is_woken = False
        while self._calls:
            function, args = self._calls.popleft()
            try:
                function(*args)
            except Exception as error:  # a failed call must not stop the calls after it
                self._loop.call_exception_handler(
                    {"message": f"{function!r} failed", "exception": error}
                )
