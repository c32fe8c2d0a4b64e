"""A call is repeated until it is answered, with pauses."""

import asyncio

import pytest
from structlog.testing import capture_logs

from ledgers.errors import (
    LeadershipLostError,
    NoNodeError,
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
    UnknownOutcomeError,
)
from ledgers.tasks import until_answered
from tests.virtual_time import LoopClock, run


class Calls:
    """A call that fails with each of these errors, one after the other, and answers then."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.times_s: list[float] = []

    async def __call__(self) -> str:
        self.times_s.append(asyncio.get_running_loop().time())
        if self._errors:
            raise self._errors.pop(0)
        return "answer"


def test_a_call_is_repeated_after_pauses_that_double() -> None:
    calls = Calls(*[UnavailableError("busy")] * 5, UnknownOutcomeError("lost"))

    async def scenario() -> str:
        return await until_answered(
            calls, event="value.unread", clock=LoopClock(), retry_min_s=1, retry_max_s=5
        )

    assert run(scenario()) == "answer"
    assert calls.times_s == [0, 1, 3, 7, 12, 17, 22]


def test_each_failure_is_logged_with_the_pause_that_follows() -> None:
    async def scenario() -> None:
        call = Calls(UnavailableError("busy"))
        await until_answered(call, event="value.unread", clock=LoopClock(), retry_min_s=2, what="x")

    with capture_logs() as logs:
        run(scenario())

    assert logs == [
        {
            "event": "value.unread",
            "log_level": "warning",
            "error": "busy",
            "retry_s": 2,
            "what": "x",
        }
    ]


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(SessionLostError("over"), id="the session's end, which does not pass"),
        pytest.param(LeadershipLostError("over"), id="the leadership's end"),
        pytest.param(NoNodeError("gone"), id="a no is an answer"),
        pytest.param(UnauthorizedError("shut"), id="unless the caller counts it as no answer"),
    ],
)
def test_any_other_error_is_raised_at_once(error: Exception) -> None:
    calls = Calls(error)

    async def scenario() -> None:
        await until_answered(calls, event="value.unread", clock=LoopClock())

    with pytest.raises(type(error)):
        run(scenario())
    assert len(calls.times_s) == 1


def test_the_caller_decides_which_errors_are_retried() -> None:
    calls = Calls(UnauthorizedError("shut"), UnavailableError("busy"))

    async def scenario() -> str:
        errors = (UnavailableError, UnauthorizedError)
        return await until_answered(calls, event="v.unread", clock=LoopClock(), errors=errors)

    assert run(scenario()) == "answer"
