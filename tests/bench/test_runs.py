"""Planned runs, recorded runs, and the order of contenders."""

from collections import Counter
from pathlib import Path

from bench.contenders import CONTENDERS
from bench.loads import LOADS
from bench.repair import BESIDE_WRITER, plan
from bench.runs import Pass, Run, RunFile
from tests.bench.bench_runs import run


def test_every_contender_runs_its_loads_as_often_as_requested() -> None:
    turns = plan(CONTENDERS, list(LOADS.values()), repeat=3, writer_repeat=1)

    keys = [key for turn in turns for key in turn.keys]
    alone = [key for key in keys if key.of_pass is Pass.ALONE]
    met = [(each.name, load) for each in CONTENDERS for load in LOADS]
    assert len(set(keys)) == len(keys)
    assert Counter((key.contender, key.load) for key in alone) == Counter(met * 3)
    assert len(keys) - len(alone) == len(BESIDE_WRITER) * len(LOADS)


def test_the_order_of_contenders_is_reversed_each_time() -> None:
    turns = plan(CONTENDERS, list(LOADS.values()), repeat=2, writer_repeat=0)

    first, second = turns[: len(CONTENDERS)], turns[len(CONTENDERS) :]
    assert [turn.contender for turn in second] == [turn.contender for turn in reversed(first)]


def test_recorded_runs_survive_the_process(tmp_path: Path) -> None:
    path = tmp_path / "repair.jsonl"
    run_file(path).add(run("ours"))
    run_file(path).add(run("java"))

    assert [each.contender for each in run_file(path)] == ["ours", "java"]


def test_a_repeated_measurement_replaces_only_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "repair.jsonl"
    before = run_file(path)
    before.add(run("ours", whole_s=5.0))
    before.add(run("java"))

    before.forget({run("ours").key})
    assert [each.contender for each in run_file(path)] == ["java"]

    run_file(path).add(run("ours", whole_s=1.0))
    assert sorted(each.contender for each in run_file(path)) == ["java", "ours"]


def run_file(path: Path) -> RunFile[Run]:
    return RunFile(path, Run)
