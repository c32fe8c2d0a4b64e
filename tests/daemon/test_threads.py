"""A service of the node: restarted when it fails, and stopped at any time."""

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from structlog.testing import capture_logs

from daemon import threads
from daemon.threads import CALM_S, RESTART_MAX_S, RESTART_MIN_S, ServiceThread, leaves
from ledgers.errors import LeadershipLostError, SessionLostError
from tests.virtual_time import VirtualTimeLoop

PATIENCE_S = 30.0
"""No test waits this long unless it fails."""

Session = Callable[[], Awaitable[None]]


@pytest.fixture
def start() -> Iterator[Callable[..., ServiceThread]]:
    """Return a function that starts services. They are stopped at the end."""
    roles: list[ServiceThread] = []

    def started(session: Session, *, is_virtual: bool = False) -> ServiceThread:
        loop_factory = VirtualTimeLoop if is_virtual else None
        role = ServiceThread("worker", session, loop_factory=loop_factory)
        roles.append(role)
        role.start()
        return role

    yield started
    for role in roles:
        role.stop(timeout_s=PATIENCE_S)


async def wait_forever() -> None:
    await asyncio.Event().wait()


class Sessions:
    """Sessions with given durations that end with an error. The last session waits."""

    def __init__(self, *durations_s: float, error: Exception | None = None) -> None:
        self.begun_s: list[float] = []
        self.ended_s: list[float] = []
        self.are_over = threading.Event()
        self._durations_s = list(durations_s)
        self._error = error or SessionLostError("over")

    async def __call__(self) -> None:
        now_s = asyncio.get_running_loop().time
        self.begun_s.append(now_s())
        if not self._durations_s:
            self.are_over.set()
            await asyncio.sleep(1e9)
        await asyncio.sleep(self._durations_s.pop(0))
        self.ended_s.append(now_s())
        raise self._error

    @property
    def pauses_s(self) -> list[float]:
        """Return the times between the end of each session and the start of the next."""
        return [
            begun_s - ended_s
            for begun_s, ended_s in zip(self.begun_s[1:], self.ended_s, strict=True)
        ]


def test_a_failed_session_restarts_after_doubling_pauses(
    start: Callable[..., ServiceThread],
) -> None:
    sessions = Sessions(*[0.0] * 10)

    start(sessions, is_virtual=True)

    assert sessions.are_over.wait(PATIENCE_S)
    wait_s = RESTART_MIN_S
    for pause_s in sessions.pauses_s:
        assert 0.5 * wait_s <= pause_s <= wait_s
        wait_s = min(2 * wait_s, RESTART_MAX_S)
    assert wait_s == RESTART_MAX_S


def test_a_long_session_resets_the_pauses(start: Callable[..., ServiceThread]) -> None:
    sessions = Sessions(*[0.0] * 6, CALM_S + 1, 0.0)

    start(sessions, is_virtual=True)

    assert sessions.are_over.wait(PATIENCE_S)
    assert sessions.pauses_s[5] > 4 * RESTART_MIN_S
    assert sessions.pauses_s[6] <= RESTART_MIN_S
    assert sessions.pauses_s[7] <= 2 * RESTART_MIN_S


def test_a_session_that_returns_is_restarted_too(
    start: Callable[..., ServiceThread],
) -> None:
    begun: list[int] = []
    is_third = threading.Event()

    async def session() -> None:
        begun.append(1)
        if len(begun) == 3:
            is_third.set()
            await asyncio.sleep(1e9)

    start(session, is_virtual=True)

    assert is_third.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("error", "event", "level"),
    [
        pytest.param(SessionLostError("it is gone"), "role.restarted", "warning", id="expected"),
        pytest.param(
            ExceptionGroup(
                "tasks", [LeadershipLostError("it is gone"), SessionLostError("it too")]
            ),
            "role.restarted",
            "warning",
            id="several expected ones",
        ),
        pytest.param(ZeroDivisionError(), "role.crashed", "error", id="a defect"),
        pytest.param(
            ExceptionGroup("tasks", [SessionLostError("it is gone"), ZeroDivisionError()]),
            "role.crashed",
            "error",
            id="a defect among expected ones",
        ),
    ],
)
def test_an_unexpected_error_is_logged_as_a_crash(
    start: Callable[..., ServiceThread], error: Exception, event: str, level: str
) -> None:
    sessions = Sessions(0.0, error=error)

    with capture_logs() as logs:
        start(sessions, is_virtual=True)
        assert sessions.are_over.wait(PATIENCE_S)

    assert [(line["event"], line["log_level"], line["role"]) for line in logs] == [
        (event, level, "worker")
    ]
    assert level == "error" or "it is gone" in logs[0]["error"]


def test_a_failing_service_does_not_affect_the_other(start: Callable[..., ServiceThread]) -> None:
    other = start(wait_forever)
    sessions = Sessions(0.0, error=ZeroDivisionError())

    start(sessions, is_virtual=True)

    assert sessions.are_over.wait(PATIENCE_S)
    assert other.is_alive


def test_stopping_cancels_the_session_and_lets_it_clean_up(
    start: Callable[..., ServiceThread],
) -> None:
    has_begun = threading.Event()
    told: list[str] = []

    async def session() -> None:
        try:
            has_begun.set()
            await wait_forever()
        finally:
            await asyncio.sleep(0)
            told.append("closed")

    role = start(session)
    assert has_begun.wait(PATIENCE_S)

    assert role.stop(timeout_s=PATIENCE_S)

    assert told == ["closed"]
    assert not role.is_alive
    assert role.stop(timeout_s=0), "any number of times"


def test_stopping_ends_the_pause_before_the_next_session(
    start: Callable[..., ServiceThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "RESTART_MIN_S", 1000.0)
    has_failed = threading.Event()

    async def session() -> None:
        has_failed.set()
        raise SessionLostError("over")

    role = start(session)
    assert has_failed.wait(PATIENCE_S)

    assert role.stop(timeout_s=PATIENCE_S)


def test_an_error_on_cancellation_does_not_prevent_the_stop(
    start: Callable[..., ServiceThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "RESTART_MIN_S", 1000.0)
    has_begun = threading.Event()

    async def session() -> None:
        try:
            has_begun.set()
            await wait_forever()
        finally:
            raise SessionLostError("as it could not be closed")

    role = start(session)
    assert has_begun.wait(PATIENCE_S)

    assert role.stop(timeout_s=PATIENCE_S)


def test_stop_returns_false_if_the_session_does_not_end(
    start: Callable[..., ServiceThread],
) -> None:
    may_end = threading.Event()
    has_begun = threading.Event()

    async def session() -> None:
        has_begun.set()
        may_end.wait(PATIENCE_S)  # a defect: it blocks the loop

    role = start(session)
    assert has_begun.wait(PATIENCE_S)

    assert not role.stop(timeout_s=0.05)
    assert role.is_alive

    may_end.set()
    assert role.stop(timeout_s=PATIENCE_S)


def test_a_service_stopped_before_its_start_never_runs() -> None:
    begun: list[int] = []

    async def session() -> None:
        begun.append(1)

    role = ServiceThread("worker", session)
    assert role.stop(timeout_s=0)

    role.start()
    assert role.stop(timeout_s=PATIENCE_S)
    assert begun == []


def test_the_leaves_of_nested_groups_are_the_single_errors() -> None:
    one, two, three = ValueError(1), ValueError(2), ValueError(3)
    group = ExceptionGroup("outer", [one, ExceptionGroup("inner", [two, three])])

    assert leaves(group) == [one, two, three]
    assert leaves(one) == [one]


# --- Probes ---------------------------------------------------------------------------------------


def test_a_loop_that_is_blocked_is_silent_until_it_runs_again(
    start: Callable[..., ServiceThread],
) -> None:
    is_blocked, may_go_on = threading.Event(), threading.Event()

    async def block() -> None:
        is_blocked.set()
        may_go_on.wait(PATIENCE_S)
        await wait_forever()

    role = start(block)
    assert is_blocked.wait(PATIENCE_S)
    role.probe()
    role.probe()
    time.sleep(0.05)
    assert role.silent_s >= 0.05

    may_go_on.set()
    until_s = time.monotonic() + PATIENCE_S
    while role.silent_s:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_thread_that_does_not_run_is_silent_for_ever(
    start: Callable[..., ServiceThread],
) -> None:
    not_started = ServiceThread("worker", wait_forever)
    not_started.probe()
    assert not_started.silent_s == math.inf

    role = start(wait_forever)
    assert role.stop(timeout_s=PATIENCE_S)
    role.probe()
    assert role.silent_s == math.inf
