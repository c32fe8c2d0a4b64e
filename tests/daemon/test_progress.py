"""How far a long command is, and when it will be done."""

import io

import pytest

from daemon.cli.progress import LINE_INTERVAL_S, Eta, ProgressLine, counted, duration_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seen", "remaining_s"),
    [
        pytest.param([(0, 100)], None, id="nobody can tell from one look"),
        pytest.param([(0, 100), (10, 100)], None, id="nor while nothing moves"),
        pytest.param([(0, 100), (10, 110)], None, id="nor while it grows"),
        pytest.param([(0, 100), (10, 50)], 10.0, id="half in ten seconds: ten more"),
        pytest.param([(0, 100), (10, 0)], 0.0, id="done"),
        pytest.param(
            [(0, 10_000), (10, 1_000), (180, 920), (300, 800)],
            800.0,
            id="the speed is that of the last minutes, not of the beginning",
        ),
        pytest.param(
            [*((s, s) for s in range(1_000)), (1_010, 990), (1_020, 980)],
            980 * 21 / 19,
            id="nor is it measured from before more came",
        ),
        pytest.param(
            [(0, 40), (100, 30), (200, 29), (300, 25)],
            500.0,
            id="but of no fewer than twenty that are done",
        ),
    ],
)
def test_the_time_that_is_left_follows_from_what_was_seen(
    seen: list[tuple[float, int]], remaining_s: float | None
) -> None:
    eta = Eta()

    told = [eta.remaining_s(left, now_s=now_s) for now_s, left in seen]

    assert told[-1] == (None if remaining_s is None else pytest.approx(remaining_s))


@pytest.mark.parametrize(
    ("seen", "remaining_s"),
    [
        pytest.param([(0, 100, 0), (10, 50, 50)], None, id="all that is left waits"),
        pytest.param([(0, 100, 0), (10, 50, 20)], 10.0, id="some of it moves"),
        pytest.param([(0, 100, 0), (10, 50, 52)], None, id="more wait than were counted"),
        pytest.param([(0, 100, 0), (10, 0, 0)], 0.0, id="nothing is left, and nothing waits"),
        pytest.param(
            [(0, 100, 0), (10, 50, 50), (90, 50, 50), (100, 50, 0), (110, 40, 0)],
            40.0,
            id="the time of waiting says nothing of the speed afterwards",
        ),
        pytest.param(
            [(0, 50, 0), (90, 50, 50), (91, 49, 0)], None, id="nor does one look after it"
        ),
    ],
)
def test_the_time_of_waiting_is_no_measure(
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
def test_a_duration_is_told_in_its_two_largest_units(duration_s: float, text: str) -> None:
    assert duration_text(duration_s) == text


def test_a_terminal_shows_one_line_in_place_of_the_other() -> None:
    terminal = Terminal()
    line = ProgressLine("ledger", stream=terminal)

    line.show(2_000)
    line.show(1_000, beside="5 of them wait")
    line.close()
    line.close()

    first, second = terminal.getvalue().split("\r")[1:]
    assert "2,000 ledgers left" in first
    assert "1,000 ledgers left" in second
    assert second.endswith("; 5 of them wait\n")
    assert terminal.getvalue().count("\n") == 1


def test_anywhere_else_lines_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    log, now_s = io.StringIO(), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    line = ProgressLine("ledger", stream=log)

    for left in range(30, 0, -1):
        line.show(left)
        now_s[0] += 1
    line.close()

    lines = log.getvalue().splitlines()
    assert len(lines) == 30 / LINE_INTERVAL_S
    assert lines[0] == "30 ledgers left"
    assert lines[1] == "20 ledgers left, 20 s to go"


def test_that_something_waits_is_told_at_once_and_then_now_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, now_s = io.StringIO(), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    line = ProgressLine("ledger", stream=log)

    for beside in ("", "it waits for 30 s", "it waits for 29 s"):
        line.show(1, beside=beside)
        now_s[0] += 1

    assert log.getvalue().splitlines() == ["1 ledger left", "1 ledger left; it waits for 30 s"]


@pytest.mark.parametrize("stream", [io.StringIO, Terminal], ids=["a log", "a terminal"])
def test_that_nothing_is_left_is_no_news(stream: type[io.StringIO]) -> None:
    told = stream()
    line = ProgressLine("ledger", stream=told)

    line.show(0)
    line.close()

    assert told.getvalue() == ""


def test_a_terminal_does_not_keep_what_was_left_before_all_was_done() -> None:
    terminal = Terminal()
    line = ProgressLine("ledger", stream=terminal)

    line.show(1)
    line.show(0)
    line.close()

    assert terminal.getvalue().endswith("1 ledger left\r\x1b[K")


@pytest.mark.parametrize(("count", "text"), [(1, "1 ledger"), (1_200, "1,200 ledgers")])
def test_one_is_told_as_one(count: int, text: str) -> None:
    stream = io.StringIO()

    ProgressLine("ledger", stream=stream).show(count)

    assert stream.getvalue() == f"{text} left\n"


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
def test_what_is_counted_is_told_in_good_english(count: int, unit: str, text: str) -> None:
    assert counted(count, unit) == text
