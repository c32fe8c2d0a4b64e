"""Groups of tasks, waits, changes, repeated calls and shared reads."""

import asyncio
import math
from contextlib import aclosing

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
from ledgers.tasks import (
    Changing,
    SharedReads,
    gather_in_parts,
    task_scope,
    until_answered,
    wait_woken,
)
from tests.replication.cluster import in_virtual_time
from tests.virtual_time import LoopClock, run


@in_virtual_time
async def test_tasks_end_with_their_block() -> None:
    async with task_scope() as scope:
        task = scope.start(asyncio.sleep(60))
        await asyncio.sleep(1)

    assert task.cancelled()
    assert asyncio.get_running_loop().time() == 1


@in_virtual_time
async def test_an_error_of_a_task_ends_the_block_and_is_not_wrapped() -> None:
    async def fail() -> None:
        raise UnavailableError("time-out")

    async def wait_for(other: asyncio.Task[None]) -> None:
        async with task_scope() as scope:
            scope.start(fail())
            await other

    other = asyncio.create_task(asyncio.sleep(60))
    with pytest.raises(UnavailableError):
        await wait_for(other)


@in_virtual_time
async def test_an_error_of_the_block_is_not_wrapped() -> None:
    async def fail() -> None:
        async with task_scope() as scope:
            scope.start(asyncio.sleep(60))
            raise UnavailableError("time-out")

    with pytest.raises(UnavailableError):
        await fail()


@in_virtual_time
async def test_a_cancelled_block_cancels_its_tasks() -> None:
    started: list[asyncio.Task[None]] = []

    async def block() -> None:
        async with task_scope() as scope:
            started.append(scope.start(asyncio.sleep(60)))
            await asyncio.sleep(60)

    task = asyncio.create_task(block())
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert started[0].cancelled()


@pytest.mark.parametrize("timeout_s", [None, math.inf, 3.0])
@in_virtual_time
async def test_a_waiting_caller_is_woken(timeout_s: float | None) -> None:
    wake = asyncio.Event()
    asyncio.get_running_loop().call_later(2, wake.set)

    assert await wait_woken(wake, timeout_s=timeout_s)
    assert asyncio.get_running_loop().time() == 2
    assert wake.is_set()


@pytest.mark.parametrize(("timeout_s", "waited_s"), [(2.0, 2), (0.0, 0), (-1.0, 0)])
@in_virtual_time
async def test_a_waiting_caller_continues_when_the_time_is_over(
    timeout_s: float, waited_s: float
) -> None:
    assert not await wait_woken(asyncio.Event(), timeout_s=timeout_s)
    assert asyncio.get_running_loop().time() == waited_s


def test_values_are_processed_in_parts_and_keep_their_order() -> None:
    under_way, most = 0, 0

    async def work(value: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(10 - value)
        under_way -= 1
        return 2 * value

    assert run(gather_in_parts(work, range(5), at_once=2)) == [0, 2, 4, 6, 8]
    assert most == 2


# --- Changes --------------------------------------------------------------------------------------


class Switch(Changing):
    def press(self) -> None:
        self._notify_change()


@in_virtual_time
async def test_a_change_wakes_all_waiting_callers() -> None:
    switch = Switch()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(switch.wait_change(0))
        await asyncio.sleep(1)
        switch.press()

    assert asyncio.get_running_loop().time() == 1


@in_virtual_time
async def test_a_change_before_the_wait_is_not_missed() -> None:
    switch = Switch()
    seen = switch.change_count
    switch.press()

    await switch.wait_change(seen)

    assert asyncio.get_running_loop().time() == 0


@in_virtual_time
async def test_a_wait_after_a_change_is_for_the_next_one() -> None:
    switch = Switch()
    switch.press()

    await switch.wait_change(switch.change_count, timeout_s=5)

    assert asyncio.get_running_loop().time() == 5


@in_virtual_time
async def test_changes_while_no_caller_waits_count_as_one() -> None:
    switch = Switch()
    async with aclosing(switch.changes()) as changes:
        first = asyncio.create_task(anext(changes))
        await asyncio.sleep(1)
        switch.press()
        await first

        switch.press()
        switch.press()
        await anext(changes)
        third = asyncio.create_task(anext(changes))
        await asyncio.sleep(1)

        assert not third.done()
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)


@in_virtual_time
async def test_a_change_before_a_follower_starts_is_not_missed() -> None:
    switch = Switch()
    async with aclosing(switch.changes()) as changes:
        switch.press()

        async with asyncio.timeout(1):
            await anext(changes)


# --- Calls repeated until they are answered -------------------------------------------------------


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


# --- Reads that callers share ---------------------------------------------------------------------


class Server:
    """A server that answers after a second with its value when the read reached it."""

    def __init__(self) -> None:
        self.value = 0
        self.reads = 0
        self.failures = 0

    async def read(self, key: str) -> int:
        self.reads += 1
        if self.failures:
            self.failures -= 1
            raise UnavailableError("no answer")
        value = self.value
        await asyncio.sleep(1)
        return value


@in_virtual_time
async def test_concurrent_callers_share_a_read() -> None:
    server = Server()
    shared = SharedReads(server.read)

    values = await asyncio.gather(*(shared.get(["b"]) for _ in range(50)))

    assert values == [{"b": 0}] * 50
    assert server.reads == 2  # the first one began before the others came


@in_virtual_time
async def test_callers_for_several_keys_share_their_reads() -> None:
    server = Server()
    shared = SharedReads(server.read)

    await asyncio.gather(shared.get(["a"]), shared.get(["b", "c"]), shared.get(["c", "d"]))

    assert server.reads == 4  # a alone, then b, c and d


@in_virtual_time
async def test_a_read_that_has_started_does_not_answer_later_callers() -> None:
    server = Server()
    shared = SharedReads(server.read)
    first = asyncio.create_task(shared.get(["b"]))
    await asyncio.sleep(0.5)
    server.value = 1

    later = await asyncio.gather(*(shared.get(["b"]) for _ in range(50)))

    assert await first == {"b": 0}
    assert later == [{"b": 1}] * 50
    assert server.reads == 2


@in_virtual_time
async def test_a_failed_read_fails_only_its_caller() -> None:
    server = Server()
    server.failures = 1
    shared = SharedReads(server.read)

    first, second = await asyncio.gather(
        shared.get(["b"]), shared.get(["b"]), return_exceptions=True
    )

    assert isinstance(first, UnavailableError)
    assert second == {"b": 0}


@in_virtual_time
async def test_a_cancelled_caller_leaves_the_others_their_answer() -> None:
    server = Server()
    shared = SharedReads(server.read)
    first = asyncio.create_task(shared.get(["b"]))
    second = asyncio.create_task(shared.get(["b"]))
    await asyncio.sleep(0.5)

    first.cancel()

    assert await second == {"b": 0}
    with pytest.raises(asyncio.CancelledError):
        await first


@in_virtual_time
async def test_all_callers_of_a_read_go_on_together() -> None:
    """Within a few turns of the loop, so that their next writes share a transaction."""
    gates = {number: asyncio.Event() for number in (1, 2)}
    ended: list[int] = []
    reads = 0

    async def read(key: str) -> None:
        nonlocal reads
        reads += 1
        await gates[reads].wait()

    async def get(number: int) -> None:
        await shared.get(["b"])
        ended.append(number)

    shared = SharedReads(read)
    async with asyncio.TaskGroup() as tasks:
        for number in range(50):
            tasks.create_task(get(number))
        for gate in gates.values():
            await asyncio.sleep(1)
            gate.set()
        for _ in range(6):
            await asyncio.sleep(0)
        assert len(ended) == 50
