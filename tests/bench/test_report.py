"""The report of the bench: figures, goals, and omitted values."""

import xml.etree.ElementTree as ElementTree

import pytest

from bench.contenders import JAVA, OURS, OURS_OPEN
from bench.figures import WHOLE_S, Figures
from bench.goals import times_sooner, writers_p99
from bench.plot import plot
from bench.report import goals_table, report
from bench.runs import Pass
from bench.writer import Disturbance, Latency
from tests.bench.bench_runs import run


def latency(p99_ms: float) -> Latency:
    return Latency(adds=1_000, p50_ms=1.0, p99_ms=p99_ms)


def disturbed(p99_ms: float) -> Disturbance:
    return Disturbance(before=latency(10), during=latency(p99_ms), after=latency(20))


def test_the_best_of_several_runs_is_shown_beside_their_median() -> None:
    runs = [run("ours", repeat=number, whole_s=s) for number, s in enumerate((3.0, 1.0, 2.0), 1)]

    summary = WHOLE_S.summary(runs)

    assert (summary.best, summary.median) == (1.0, 2.0)


def test_times_sooner_compares_medians_and_best_runs_separately() -> None:
    java = [
        run(JAVA.name, repeat=number, whole_s=s) for number, s in enumerate((10.0, 30.0, 20.0), 1)
    ]
    mine = [
        run(OURS_OPEN.name, repeat=number, whole_s=s) for number, s in enumerate((1.0, 4.0, 2.0), 1)
    ]

    ratio = times_sooner(OURS_OPEN, JAVA)(Figures(java + mine), "a")

    assert ratio is not None
    assert (ratio.best, ratio.median) == (10.0, 10.0)


def test_without_one_of_its_sides_a_ratio_is_omitted() -> None:
    assert times_sooner(OURS_OPEN, JAVA)(Figures([run(OURS_OPEN.name)]), "a") is None


def test_runs_with_and_without_a_writer_are_not_mixed() -> None:
    beside = run(JAVA.name, of_pass=Pass.BESIDE_WRITER, whole_s=99.0)

    assert times_sooner(OURS_OPEN, JAVA)(Figures([run(OURS_OPEN.name), beside]), "a") is None


def test_a_writers_p99_is_compared_with_its_p99_beside_java() -> None:
    figures = Figures(
        run(contender.name, of_pass=Pass.BESIDE_WRITER, writer=disturbed(p99_ms))
        for contender, p99_ms in ((OURS, 30.0), (JAVA, 60.0))
    )

    ratio = writers_p99(figures, "a")

    assert ratio is not None
    assert ratio.median == 0.5


@pytest.mark.parametrize(
    ("whole_s", "verdicts"),
    [
        pytest.param(0.5, ["met", "met"], id="40 times: both"),
        pytest.param(1.4, ["met", "MISSED"], id="14 times: not the aim"),
        pytest.param(4.0, ["MISSED", "MISSED"], id="5 times: neither"),
    ],
)
def test_goals_are_reported_as_met_or_missed(whole_s: float, verdicts: list[str]) -> None:
    figures = Figures([run(JAVA.name, whole_s=20.0), run(OURS.name, whole_s=whole_s)])

    (row,) = [
        line for line in goals_table(figures).splitlines() if "times sooner than Java" in line
    ]

    assert [cell.strip() for cell in row.split("|")][-3:-1] == verdicts


def test_missing_measurements_are_omitted_from_the_report() -> None:
    text = report([run(JAVA.name), run(OURS_OPEN.name)], failures=["Java: it broke"])

    assert "## a: " in text
    assert "## b: " not in text
    assert "Beside a writer" not in text
    assert "Java: it broke" in text


def test_a_load_without_entries_has_no_rate_of_entries() -> None:
    text = report([run(OURS_OPEN.name, load="e", lost_entries=0, lost_bytes=0, copied_bytes=0)])

    assert "nan" not in text


@pytest.mark.parametrize(
    "runs", [[], [run(JAVA.name), run(OURS.name, load="f")]], ids=["none", "two"]
)
def test_the_plot_is_an_image_for_any_measurements(runs: list[object]) -> None:
    ElementTree.fromstring(plot(runs))  # type: ignore[arg-type]
