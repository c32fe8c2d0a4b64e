"""The figures of the change feed: what must be reached, what is aimed at, and what was measured.

Each part has one record, with its figures and a text for people. Some were measured once, with
benches that are gone; their recorded figures stay.
"""

from collections.abc import Callable

from bench.records import Records
from bench.report import CORES, Goal, Summary, failures_section, goals_section, named

LOG, FIRST_MARK = "log", "first-mark"
RECORDED = ("take-over", "behind", "receipts", "catch-up", "fsck")
"""The parts that are no longer measured."""
OTHERS_SHARE = "others_share"
"""A value of every record: the share of all cores that other programs used."""
QUIET_SHARE_MAX = 0.1
"""More than this, and the report says that the machine was busy."""
CHANGES = "changes a second into the log, as many as possible"
FIRST = "first mark after a loss, beside 5,000 changes/s"
TAKEOVER = "take-over at 1,000,000 ledgers, 10,000 changes, beyond the scan"
KNOWN = "client 1,000,000 changes behind knows all of them"
STORED = "stored receipts of one-second checkpoints, completed in random order"
CATCH_UP = "catch-up of 100,000 changes, times the rate of etcd's watch"
FSCK = "fsck --changed, 1,000 of 1,000,000 ledgers, times sooner than all"
PREAMBLE = """\
# The change feed

Everything runs on one machine with {cores} cores: ZooKeeper, bookies, a node, the load and the
clients. The figures depend on the machine. `bench/README.md` says what each figure means.

Recorded results, which were measured once and are not measured again: {recorded}.
The peer in catch-up was etcd, in the same run.
"""


def _measured(part: str, name: str) -> Callable[[Records], Summary]:
    return lambda records: named(name, "").summary(records.find(part))


GOALS = [
    Goal(
        title,
        _measured(part, name),
        must,
        aim,
        at_least=aim > must,
        unit=unit,
        digits=digits,
    )
    for part, name, must, aim, unit, digits, title in (
        (LOG, "changes_per_s", 10_000, 30_000, "", 0, CHANGES),
        (LOG, "median_ms", 150, 60, " ms", 0, "change to follower at 1,000 changes/s, median"),
        (LOG, "p99_ms", 500, 200, " ms", 0, "change to follower at 1,000 changes/s, p99"),
        (FIRST_MARK, "first_mark_ms", 100, 30, " ms", 0, FIRST),
        ("take-over", "takeover_s", 10, 3, " s", 1, TAKEOVER),
        ("behind", "known_s", 30, 10, " s", 1, KNOWN),
        ("behind", "memory_mb", 250, 100, " MB", 0, "its memory meanwhile"),
        ("receipts", "stored_kb", 1_000, 10, " KB", 1, STORED),
        ("catch-up", "times_the_watch", 0.5, 1, "", 1, CATCH_UP),
        ("fsck", "times_sooner", 10, 50, "", 0, FSCK),
    )
]


def report(records: Records) -> str:
    sections = [
        PREAMBLE.format(cores=CORES, recorded=", ".join(RECORDED)),
        *failures_section(records),
        goals_section(GOALS, records),
    ]
    for part in (LOG, FIRST_MARK, *RECORDED):
        for record in records.find(part):
            others = record.values[OTHERS_SHARE]
            busy = f"\n\nThe machine was busy: others used {others:.0%} of the cores."
            kind = " (recorded)" if part in RECORDED else ""
            busy_or_not = busy if others > QUIET_SHARE_MAX else ""
            sections.append(f"## {part}{kind}\n\n{record.text}{busy_or_not}\n")
    return "\n".join(sections)
