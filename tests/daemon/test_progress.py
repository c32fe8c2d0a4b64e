"""The progress of a long command, and the time left."""

import io

import pytest

from daemon.cli.progress import LINE_INTERVAL_S, Eta, Line, ProgressLine
from daemon.words import counted, duration_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seen", "remaining_s"),
    [
        pytest.param([(0, 100)], None, id="one sample is not enough"),
        pytest.param([(0, 100), (10, 100)], None, id="unknown while nothing moves"),
        pytest.param([(0, 100), (10, 110)], None, id="unknown while it grows"),
        pytest.param([(0, 100), (10, 50)], 10.0, id="ten seconds for one half, ten for the other"),
        pytest.param([(0, 100), (10, 0)], 0.0, id="done"),
        pytest.param(
            [(0, 10_000), (10, 1_000), (180, 920), (300, 800)],
            800.0,
            id="the speed of the last minutes counts",
        ),
        pytest.param(
            [*((s, s) for s in range(1_000)), (1_010, 990), (1_020, 980)],
            980 * 21 / 19,
            id="the speed after an increase counts",
        ),
        pytest.param(
            [(0, 40), (100, 30), (200, 29), (300, 25)],
            500.0,
            id="the speed of at least twenty counts",
        ),
    ],
)
def test_the_time_left_follows_from_the_recent_speed(
    seen: list[tuple[float, int]], remaining_s: float | None
) -> None:
    eta = Eta()

    told = [eta.remaining_s(left, now_s=now_s) for now_s, left in seen]

    assert told[-1] == (None if remaining_s is None else pytest.approx(remaining_s))


@pytest.mark.parametrize(
    ("seen", "remaining_s"),
    [
        pytest.param([(0, 100, 0), (10, 50, 50)], None, id="all that are left wait"),
        pytest.param([(0, 100, 0), (10, 50, 20)], 10.0, id="some of it moves"),
        pytest.param([(0, 100, 0), (10, 50, 52)], None, id="more wait than are left"),
        pytest.param([(0, 100, 0), (10, 0, 0)], 0.0, id="nothing is left"),
        pytest.param(
            [(0, 100, 0), (10, 50, 50), (90, 50, 50), (100, 50, 0), (110, 40, 0)],
            40.0,
            id="the time of waiting does not count",
        ),
        pytest.param(
            [(0, 50, 0), (90, 50, 50), (91, 49, 0)],
            None,
            id="one sample after waiting is not enough",
        ),
    ],
)
def test_waiting_ledgers_do_not_count_for_the_speed(
    seen: list[tuple[float, int, int]], remaining_s: float | None
) -> None:
    eta = Eta()

    told = [eta.remaining_s(left, now_s=now_s, waiting=waiting) for now_s, left, waiting in seen]

    assert told[-1] == (None if remaining_s is None else pytest.approx(remaining_s))


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (-5, "0 s"),
        (0.4, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (61, "1 min 1 s"),
        (3_600, "1 h"),
        (3_661, "1 h 1 min"),
        (86_400 * 2 + 3_600 * 5 + 59, "2 d 5 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(duration_s: float, text: str) -> None:
    assert duration_text(duration_s) == text


def test_a_terminal_overwrites_and_erases_its_progress_line() -> None:
    gone, terminal = Terminal(), Terminal()
    line = ProgressLine(stream=gone)
    line.show(1)
    line.show(0)
    line.close()
    assert gone.getvalue().endswith("1 ledger left\r\x1b[K")

    line = ProgressLine(stream=terminal)

    line.show(2_000)
    line.show(1_000, beside="5 of them wait")
    line.close()
    line.close()

    first, second = terminal.getvalue().split("\r")[1:]
    assert "2,000 ledgers left" in first
    assert "1,000 ledgers left" in second
    assert second.endswith("; 5 of them wait\n")
    assert terminal.getvalue().count("\n") == 1


def test_a_line_on_a_terminal_is_cut_before_it_would_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()

    Line(stream=terminal).write("x" * 50, now_s=0)

    assert terminal.getvalue() == "\r\x1b[K" + "x" * 19


def test_a_log_gets_few_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    log, now_s = io.StringIO(), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    line = ProgressLine(stream=log)

    for left in range(30, 0, -1):
        line.show(left)
        now_s[0] += 1
    line.close()

    lines = log.getvalue().splitlines()
    assert len(lines) == 30 / LINE_INTERVAL_S
    assert lines[0] == "30 ledgers left"
    assert lines[1] == "20 ledgers left, 20 s to go"


def test_a_first_waiting_ledger_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Later progress lines come at intervals."""
    log, now_s = io.StringIO(), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    line = ProgressLine(stream=log)

    for beside in ("", "it waits for 30 s", "it waits for 29 s"):
        line.show(1, beside=beside)
        now_s[0] += 1

    assert log.getvalue().splitlines() == ["1 ledger left", "1 ledger left; it waits for 30 s"]


@pytest.mark.parametrize("stream", [io.StringIO, Terminal], ids=["a log", "a terminal"])
def test_nothing_is_printed_if_nothing_was_left(stream: type[io.StringIO]) -> None:
    told = stream()
    line = ProgressLine(stream=told)

    line.show(0)
    line.close()

    assert told.getvalue() == ""


@pytest.mark.parametrize(
    ("count", "unit", "text"),
    [
        (1, "ledger", "1 ledger"),
        (0, "ledger", "0 ledgers"),
        (1_200, "ledger", "1,200 ledgers"),
        (1, "entry", "1 entry"),
        (2, "entry", "2 entries"),
    ],
)
def test_counted_units_have_the_right_plural(count: int, unit: str, text: str) -> None:
    assert counted(count, unit) == text
