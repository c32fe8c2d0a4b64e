"""The report of the fsck bench."""

from typing import Any

from msgspec.structs import replace

from bench.fsck.processes import SparkCpu
from bench.fsck.records import Pass
from bench.fsck.report import report


def looked(**changes: Any) -> Pass:
    fields: dict[str, Any] = {
        "load": "1 KB",
        "contender": "ours",
        "level": "full",
        "repeat": 1,
        "ledger_count": 10,
        "copies": 300_000,
        "copy_bytes": 318_000_000,
        "elapsed_s": 2.0,
        "cpu_s": 0.6,
        "bookies_cpu_s": 1.2,
        "zookeeper_cpu_s": 0.0,
    }
    return Pass(**(fields | changes))


def row(text: str, *starts: str) -> list[str]:
    """Return the cells behind those that the row starts with."""
    start = f"| {' | '.join(starts)} |"
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in line.removeprefix(start).strip("|").split("|")]


def test_of_several_passes_the_median_is_reported() -> None:
    passes = [looked(repeat=n, elapsed_s=s) for n, s in enumerate((1.0, 30.0, 2.0), 1)]

    told = row(report(passes, failures=[]), "1 KB", "full", "ours")

    assert told == ["3", "5", "150,000", "159", "500,000", "530", "2.00", "4.00"]


def test_copies_per_second_are_compared_with_javas() -> None:
    """On the same load."""
    java = looked(contender="Java", elapsed_s=3.0)

    text = report([looked(), java], failures=[])

    assert "1 KB: ours 150,000 copies/s with digests verified, Java 100,000 without: 1.5" in text
    assert "At least 100,000: met." in text


def on_spark(contender: str, elapsed_s: float) -> Pass:
    """Return a run over 1,000,000 ledgers that are only znodes."""
    return looked(
        load="znodes",
        level="metadata",
        contender=f"ours on Spark, {contender}",
        ledger_count=1_000_000,
        copies=0,
        elapsed_s=elapsed_s,
        cpu_s=9.0,
        spark_cpu=SparkCpu(driver_s=1.0, jvm_s=2.0, workers_s=6.0),
        bookies_cpu_s=0.0,
        zookeeper_cpu_s=2.25,
    )


def test_two_cores_are_compared_with_one_if_no_copy_is_read() -> None:
    one_core, one, two = (
        on_spark("local[1], all on one core", 12.0),
        on_spark("local[1]", 9.0),
        on_spark("local[2]", 6.0),
    )

    text = report([one_core, one, two], failures=[])

    assert (
        "two cores are 2.00 times as fast (the best against the best 2.00; 1.8: met) as one that"
        " all share." in text
    )
    assert (
        "local[2] is 1.50 times as fast (the best against the best 1.50; 1.8: not met) as local[1],"
        " with which 1.25" in text
    )


def test_the_scaling_of_the_cores_themselves_is_reported_too() -> None:
    one = on_spark("local[1], all on one core", 12.0)
    two = [
        replace(on_spark("local[2]", 7.5), repeat=number, scaling_of_cores=worth)
        for number, worth in enumerate((1.5, 1.7, 1.6), 1)
    ]

    text = report([one, *two], failures=[])

    assert "nothing 1.60 times as much was done (1.50 to 1.70) on two in the same minutes." in text


def test_repeated_runs_of_a_session_are_compared_with_each_other() -> None:
    again = ", in a session that has run before"
    first = [on_spark("local[1], all on one core", 9.0), on_spark("local[2]", 6.0)]
    second = [on_spark(f"local[1], all on one core{again}", 8.0), on_spark(f"local[2]{again}", 4.0)]

    text = report(first + second, failures=[])

    assert "level metadata: two cores are 1.50 times as fast" in text
    assert f"level metadata{again}: two cores are 2.00 times as fast" in text


def test_the_cpu_of_each_process_of_a_spark_run_is_reported() -> None:
    text = report([on_spark("local[1]", 9.0)], failures=[])

    parties = text.partition("who used the CPU")[2]
    told = row(parties, "znodes", "metadata", "ours on Spark, local[1]")
    assert told == ["1", "6", "2", "1", "2", "1.25"]


def test_failures_are_reported_in_any_case() -> None:
    assert "Failed: the bookies are gone" in report([], failures=["the bookies are gone"])
