"""Logs: text on a terminal, JSON everywhere else."""

import asyncio
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog

from daemon.logs import set_up_logs
from daemon.settings import LogSettings


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Restore the logging of the process after each test."""
    kazoo_level = logging.getLogger("kazoo").level
    asyncio_handlers = list(logging.getLogger("asyncio").handlers)
    yield
    structlog.reset_defaults()
    logging.getLogger("asyncio").handlers[:] = asyncio_handlers
    logging.getLogger("kazoo").setLevel(kazoo_level)


def logged(stream: io.StringIO, **settings: str) -> str:
    """Log one event of each level, and return the output."""
    set_up_logs(LogSettings(**settings), stream=stream)
    log = structlog.get_logger()
    log.debug("thing.seen", count=1)
    log.info("thing.done", count=2)
    log.warning("thing.failed", count=3)
    log.error("thing.broke", count=4)
    return stream.getvalue()


def test_a_pipe_gets_a_json_object_a_line() -> None:
    lines = [json.loads(line) for line in logged(io.StringIO()).splitlines()]

    assert [(line["event"], line["level"], line["count"]) for line in lines] == [
        ("thing.done", "info", 2),
        ("thing.failed", "warning", 3),
        ("thing.broke", "error", 4),
    ]
    assert all(line["timestamp"].endswith("Z") for line in lines)


def test_a_failed_callback_of_an_event_loop_is_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    set_up_logs(LogSettings(), stream=stream)
    set_up_logs(LogSettings(), stream=stream)  # as a reload does

    async def fail() -> None:
        asyncio.get_running_loop().call_soon(int, "x")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(fail())

    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert (line["event"], line["level"]) == ("loop.callback_failed", "error")
    assert "ValueError: invalid literal" in line["exception"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("log_format", "stream", "no_color", "is_json", "is_coloured"),
    [
        ("auto", Terminal, "", False, True),
        ("auto", Terminal, "1", False, False),
        ("text", io.StringIO, "", False, False),
        ("text", Terminal, "", False, True),
        ("json", io.StringIO, "", True, False),
        ("json", Terminal, "", True, False),
    ],
)
def test_a_configured_format_applies_everywhere_and_only_a_terminal_has_colours(
    log_format: str,
    stream: type[io.StringIO],
    no_color: str,
    is_json: bool,
    is_coloured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)

    text = logged(stream(), format=log_format)

    assert "thing.done" in text
    assert text.startswith("{") is is_json
    assert ("\x1b[" in text) is is_coloured


def test_a_later_level_also_holds_for_loggers_that_were_used_before() -> None:
    stream = io.StringIO()
    log = structlog.get_logger()
    set_up_logs(LogSettings(level="error"), stream=stream)
    log.info("thing.hidden")

    set_up_logs(LogSettings(level="debug"), stream=stream)
    log.debug("thing.seen")

    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["thing.seen"]


@pytest.mark.parametrize(
    ("level", "count"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)]
)
def test_events_below_the_level_are_left_out(level: str, count: int) -> None:
    assert len(logged(io.StringIO(), level=level).splitlines()) == count


def deep(depth: int, error: Exception) -> None:
    if depth:
        deep(depth - 1, error)
    raise error


async def fail_together(count: int, depth: int) -> None:
    async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
        for number in range(count):
            inner.create_task(asyncio.to_thread(deep, depth, OSError(28, f"no space for {number}")))
        outer.create_task(asyncio.sleep(0))


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_crash_of_many_tasks_has_a_bounded_traceback(
    log_format: str,
) -> None:
    stream = io.StringIO()
    set_up_logs(LogSettings(format=log_format), stream=stream)
    try:
        asyncio.run(fail_together(count=100, depth=200))
    except BaseExceptionGroup as error:
        structlog.get_logger().error("role.crashed", exc_info=error)

    text = stream.getvalue()
    assert log_format == "text" or len(text.splitlines()) == 1
    text = json.loads(text)["exception"] if log_format == "json" else text
    assert "Traceback" in text
    assert "no space for" in text, "a single error, not the groups that it comes in"
    assert "more errors" in text
    assert len(text.splitlines()) <= 110
    assert len(text) < 10_000


def test_kazoo_is_silenced() -> None:
    set_up_logs(LogSettings(), stream=io.StringIO())

    assert not logging.getLogger("kazoo.client").isEnabledFor(logging.ERROR)


def test_logs_go_to_the_present_standard_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, after = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", before)
    set_up_logs(LogSettings())
    log = structlog.get_logger()
    log.info("thing.done")
    monkeypatch.setattr(sys, "stderr", after)
    before.close()

    log.info("other.done")

    assert json.loads(after.getvalue())["event"] == "other.done"


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_log_that_cannot_be_written_raises_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    set_up_logs(LogSettings())

    structlog.get_logger().info("thing.done")


@pytest.mark.parametrize(
    ("count", "is_read"),
    [
        pytest.param(1_000, True, id="a pipe that is read gets every line"),
        pytest.param(20_000, False, id="a full pipe stops neither the work nor the end"),
    ],
)
def test_a_node_logs_on_a_thread(count: int, is_read: bool) -> None:
    code = f"""if True:
        import structlog, sys, warnings
        from daemon.logs import DROPPED, LogThread, set_up_logs
        from daemon.settings import LogSettings
        with LogThread():
            set_up_logs(LogSettings())
            for number in range({count}):
                structlog.get_logger().info("thing.done", number=number)
            warnings.warn("of a library")
        print(int(DROPPED._value.get()))
    """
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as node:
        assert node.stdout is not None
        assert node.stderr is not None
        if not is_read:
            assert node.wait(timeout=120) == 0
        *lines, warning = node.stderr.read().splitlines() if is_read else [""]
        dropped_count = int(node.stdout.read())

    assert (dropped_count == 0) is is_read
    if is_read:
        assert [json.loads(line)["number"] for line in lines] == list(range(count))
        assert "of a library" in warning
