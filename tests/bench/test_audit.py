"""The reports of the auditors' measurements."""

from typing import Any

import pytest

from bench.audit.__main__ import SIZES, plan
from bench.audit.plot import plot
from bench.audit.records import Idle, Loss, Record, Weight
from bench.audit.report import report
from bench.audit.turns import CONTENDERS, JAVA, OURS


def loss(contender: str = OURS.name, **changes: Any) -> Loss:
    fields: dict[str, Any] = {
        "size": 100_000,
        "contender": contender,
        "repeat": 1,
        "ledger_count": 1_000,
        "first_mark_s": 0.05,
        "all_marked_s": 0.1,
        "packets": 100,
        "cpu_s": 0.1,
        "zookeeper_cpu_s": 0.1,
        "rss_bytes": 70_000_000,
        "rss_bytes_max": 70_000_000,
        "ledgers_per_s": 20_000.0 if contender == OURS.name else None,
    }
    return Loss(**(fields | changes))


def goals(*records: Record) -> dict[str, list[str]]:
    """Return for each goal the measured value, the wanted value, and the verdict."""
    section = report(records).split("## Goals")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    return {row[0]: row[1:] for row in rows}


def test_all_contenders_lose_bookies_equally_often_in_turn() -> None:
    """The second time in the opposite order."""
    turns = list(plan(CONTENDERS, size=SIZES[0], repeat=5))

    assert [turn.contender for turn in turns] == [JAVA, OURS, OURS, JAVA]
    for contender in CONTENDERS:
        repeats = [n for turn in turns if turn.contender is contender for n in turn.repeats]
        assert repeats == [1, 2, 3, 4, 5]


def test_java_runs_the_largest_size_once() -> None:
    turns = list(plan(CONTENDERS, size=SIZES[-1], repeat=6))

    assert [turn.repeats for turn in turns if turn.contender is JAVA] == [(1,)]
    assert sum(len(turn.repeats) for turn in turns if turn.contender is OURS) == 6


@pytest.mark.parametrize(
    ("java_first_s", "shown", "verdict"),
    [
        pytest.param(2.5, "50", "met", id="just so"),
        pytest.param(2.4, "48", "MISSED", id="not quite"),
    ],
)
def test_times_sooner_compares_medians(java_first_s: float, shown: str, verdict: str) -> None:
    java = loss(JAVA.name, first_mark_s=java_first_s, all_marked_s=5.0)
    outliers = [loss(repeat=2, first_mark_s=0.001), loss(repeat=3, first_mark_s=9.0)]

    told = goals(java, loss(), *outliers)

    assert told["first mark, times sooner"] == [shown, "≥ 50", verdict]


def test_a_contender_that_once_timed_out_has_no_time() -> None:
    told = goals(loss(JAVA.name), loss(), loss(repeat=2, first_mark_s=None, all_marked_s=None))

    assert "first mark, times sooner" not in told
    assert "| not in time |" in report([loss(all_marked_s=None)])


def test_memory_per_ledger_is_the_growth_of_the_daemon() -> None:
    """The ledger map is measured separately too."""
    few = loss(size=10_000, rss_bytes=50_000_000)
    many = loss(size=100_000, rss_bytes=64_400_000)
    weight = Weight(size=100_000, ledger_map_bytes=9_000_000)

    assert goals(few, many, weight)["ledger map, a ledger"] == ["90 B", "≤ 150 B", "met"]
    assert "| RSS a ledger beyond the fewest, B | 160 |" in report([few, many, weight])


def test_an_idle_node_is_compared_with_its_goals() -> None:
    idle = Idle(
        size=100_000,
        contender=OURS.name,
        duration_s=60.0,
        cpu_s=0.6,
        rss_bytes=66_000_000,
        packets=120,
    )

    told = goals(idle)

    assert told["idle node, RSS"] == ["66 MB", "≤ 100 MB", "met"]
    assert told["idle node, of a core"] == ["1 %", "≤ 0.5 %", "MISSED"]


def test_the_plot_shows_a_line_for_each_mark_and_contender() -> None:
    records = [
        loss(name, size=size) for name in (JAVA.name, OURS.name) for size in (10_000, 100_000)
    ]

    drawn = plot(records)

    assert drawn.count("<polyline") == 4
    assert drawn.count("<circle") == 8


def test_without_any_measurement_there_is_a_report_and_a_plot() -> None:
    assert "## Goals" in report([])
    assert plot([]).endswith("</svg>\n")
