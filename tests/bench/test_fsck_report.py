"""What the bench of fsck says of its passes."""

from typing import Any

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
    """The cells behind those that it starts with."""
    start = f"| {' | '.join(starts)} |"
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in line.removeprefix(start).strip("|").split("|")]


def test_of_several_passes_the_median_is_told() -> None:
    passes = [looked(repeat=n, elapsed_s=s) for n, s in enumerate((1.0, 30.0, 2.0), 1)]

    told = row(report(passes, failures=[]), "1 KB", "full", "ours")

    assert told == ["3", "5", "150,000", "159", "500,000", "530", "2.00", "4.00"]


def test_our_copies_a_second_stand_against_javas_on_the_same_load() -> None:
    java = looked(contender="Java", elapsed_s=3.0)

    text = report([looked(), java], failures=[])

    assert "1 KB: ours 150,000 copies/s with digests verified, Java 100,000 without: 1.5" in text
    assert "At least 100,000: met." in text


def test_two_cores_stand_against_one_where_no_copy_is_read() -> None:
    one, two = (
        looked(
            load="1,000 znodes",
            level="metadata",
            contender=f"ours on Spark, local[{cores}]",
            copies=0,
            elapsed_s=elapsed_s,
        )
        for cores, elapsed_s in ((1, 9.0), (2, 6.0))
    )

    text = report([one, two], failures=[])

    assert (
        "1,000 znodes, level metadata: 2 cores are 1.50 times as fast as 1. 1.8: not met." in text
    )


def test_what_failed_is_told_whatever_else_there_is() -> None:
    assert "Failed: the bookies are gone" in report([], failures=["the bookies are gone"])
