"""The reports of the benches: medians, ratios, goals, and what was recorded."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bench import audit, feed, fsck, repair
from bench.contenders import JAVA, OURS
from bench.records import Record, Records
from bench.repair import ALONE, BESIDE_WRITER, RUN, WHOLE_S, times_sooner, writers_p99
from bench.report import Goal, Summary, goals_section
from bench.session import RESULTS


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "x.jsonl")


def run(contender: str, repeat: int = 1, name: str = ALONE, **values: float) -> Record:
    labels: dict[str, str | int] = {"pass": name, "load": "a", "contender": contender}
    return Record(name=RUN, labels=labels | {"repeat": repeat}, values=values)


def add_runs(records: Records, contender: str, *times_s: float, name: str = ALONE) -> None:
    for repeat, whole_s in enumerate(times_s, 1):
        records.add(run(contender, repeat, name, whole_s=whole_s))


def test_the_best_of_several_runs_is_shown_beside_their_median() -> None:
    runs = [run("ours", repeat, whole_s=s) for repeat, s in enumerate((3.0, 1.0, 2.0), 1)]

    assert WHOLE_S.summary(runs).text(1, has_best=True) == "1.0 / 2.0"


def test_a_figure_that_one_of_the_runs_lacks_is_not_shown() -> None:
    assert WHOLE_S.summary([run("ours", whole_s=1.0), run("ours", 2)]).text(1) == ""


def test_times_sooner_compares_best_with_best_and_median_with_median(records: Records) -> None:
    add_runs(records, JAVA.name, 10.0, 30.0, 20.0)
    add_runs(records, OURS.name, 1.0, 4.0, 2.0)

    assert times_sooner(JAVA)("a")(records) == Summary(best=10.0, median=10.0)


def test_runs_with_and_without_a_writer_are_not_mixed(records: Records) -> None:
    add_runs(records, OURS.name, 1.0)
    add_runs(records, JAVA.name, 99.0, name=BESIDE_WRITER)

    assert times_sooner(JAVA)("a")(records).text(1) == ""


def test_a_writers_p99_is_compared_with_its_p99_beside_java(records: Records) -> None:
    for contender, p99_ms in ((OURS, 30.0), (JAVA, 60.0)):
        records.add(run(contender.name, name=BESIDE_WRITER, writer_during_p99_ms=p99_ms))

    assert writers_p99("a")(records).median == 0.5


@pytest.mark.parametrize(
    ("median", "at_least", "verdicts"),
    [
        pytest.param(16.0, True, ["met", "met"], id="just the aim"),
        pytest.param(15.96, True, ["met", "met"], id="the aim, as it is shown"),
        pytest.param(14.0, True, ["met", "MISSED"], id="not the aim"),
        pytest.param(5.0, True, ["MISSED", "MISSED"], id="neither"),
        pytest.param(17.0, False, ["MISSED", "MISSED"], id="more than the most"),
    ],
)
def test_goals_are_reported_as_met_or_missed(
    records: Records, median: float, at_least: bool, verdicts: list[str]
) -> None:
    summary = Summary(best=0.0, median=median)
    goal = Goal("x", lambda _: summary, 12, 16, at_least=at_least, digits=1)

    row = goals_section([goal], records).splitlines()[-1]

    assert row.strip("| ").split(" | ")[-2:] == verdicts


def test_an_auditor_that_once_timed_out_has_no_time(records: Records) -> None:
    for repeat, values in enumerate(({"all_marked_s": 1.0}, {}), 1):
        counts = {"ledger_count": 1.0, "first_mark_s": 1.0}
        labels: dict[str, str | int] = {"size": 1_000, "contender": "ours", "repeat": repeat}
        records.add(Record(name="loss", labels=labels, values=counts | values))

    assert "| all marked after, s | not in time |" in audit.report(records)


@pytest.mark.parametrize("name", ["repair", "audit", "fsck", "feed"])
def test_the_tables_of_the_results_are_those_of_their_records(name: str) -> None:
    """The records of earlier releases stay readable, and no figure was changed by hand."""
    reports: dict[str, Callable[[Records], str]] = {
        "repair": repair.report,
        "audit": audit.report,
        "fsck": fsck.report,
        "feed": feed.report,
    }
    written = (RESULTS / f"{name}.md").read_text()

    made = reports[name](Records(RESULTS / f"{name}.jsonl"))

    assert _tables(made) == _tables(written) != []


def _tables(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("module", [repair, audit, fsck, feed], ids=lambda m: m.__name__)
def test_without_any_measurement_there_is_a_report(records: Records, module: object) -> None:
    assert module.report(records).startswith("# ")  # type: ignore[attr-defined]
