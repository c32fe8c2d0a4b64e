"""The records of the benches: what an interrupted or repeated bench keeps."""

from pathlib import Path

from bench.records import Record, Records
from bench.session import Session


def run(contender: str, **values: float) -> Record:
    return Record(name="run", labels={"contender": contender, "repeat": 1}, values=values)


def test_records_survive_the_process(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    Records(path).add(run("ours", whole_s=1.0))
    Records(path).add(run("java"))

    assert list(Records(path)) == [run("ours", whole_s=1.0), run("java")]


def test_a_repeated_measurement_replaces_only_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    records = Records(path)
    for each in (run("ours", whole_s=5.0), run("java"), run("ours", whole_s=1.0)):
        records.add(each)

    for found in (records, Records(path)):
        assert found.find("run", contender="ours") == [run("ours", whole_s=1.0)]
        assert found.find("run", contender="java") == [run("java")]
    records.forget(lambda record: record == run("java"))
    assert list(Records(path)) == [run("ours", whole_s=1.0)]


def test_a_failure_is_recorded_until_the_part_succeeds(tmp_path: Path) -> None:
    session = Session(Records(tmp_path / "x.jsonl"))

    with session.attempt("a part"):
        raise OSError("it broke")
    assert session.failed == {"a part"}
    with session.attempt("a part"):
        pass
    assert session.failed == set()
