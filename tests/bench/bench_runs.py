"""Runs as a bench records them, for the tests of reports."""

from typing import Any

from bench.loss import Measure
from bench.runs import Pass, Run

WHOLE_S = 2.0


def measure(**changes: Any) -> Measure:
    fields: dict[str, Any] = {
        "lost_ledgers": 100,
        "lost_entries": 1_000,
        "lost_bytes": 1_000_000,
        "copied_bytes": 1_000_000,
        "first_mark_s": 0.1,
        "closed_whole_s": WHOLE_S,
        "whole_s": WHOLE_S,
        "repairer_cpu_s": 0.1,
        "repairer_system_cpu_s": 0.05,
        "bookies_cpu_s": 0.5,
        "zookeeper_cpu_s": 0.2,
        "machine_cpu_s": 1.0,
        "packets": 200.0,
        "rss_bytes_max": 50_000_000,
        "gone_at_s": 0.0,
    }
    return Measure(**(fields | changes))


def run(
    contender: str,
    *,
    load: str = "a",
    repeat: int = 1,
    of_pass: Pass = Pass.ALONE,
    writer: Any = None,
    **changes: Any,
) -> Run:
    return Run(
        of_pass=of_pass,
        load=load,
        contender=contender,
        repeat=repeat,
        judged_copies=3_000,
        measure=measure(**changes),
        writer=writer,
    )
