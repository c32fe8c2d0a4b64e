"""Tests written as coroutine functions that are given what they play with."""

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

Act = Callable[..., Coroutine[Any, Any, None]]
Play = Callable[[Act, dict[str, Any]], None]
"""Runs a coroutine function with what it makes, in a loop. It also gets the test's arguments."""


def given_by(play: Play, *, count: int = 1) -> Callable[[Act], Callable[..., None]]:
    """Make a test of a coroutine function whose first ``count`` arguments ``play`` makes."""

    def decorate(act: Act) -> Callable[..., None]:
        @functools.wraps(act)
        def test(**arguments: Any) -> None:
            play(lambda *made: act(*made, **arguments), arguments)

        signature = inspect.signature(act)
        parameters = list(signature.parameters.values())[count:]
        vars(test)["__signature__"] = signature.replace(parameters=parameters)
        return test

    return decorate
