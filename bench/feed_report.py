"""The figures of the change feed: what must be reached, what is aimed at, and what was measured.

Each part has one record, with its figures and a text for people. Some were measured once, with
benches that are gone; their recorded figures stay.
"""

from bench.records import Records
from bench.report import CORES, Goal, failures_section, goals_section, named

LOG, FIRST_MARK = "log", "first-mark"
RECORDED = ("take-over", "behind", "receipts", "catch-up", "fsck")
"""The parts that are no longer measured."""
OTHERS_SHARE = "others_share"
"""A value of every record: the share of all cores that other programs used."""
QUIET_SHARE_MAX = 0.1
"""More than this, and the report says that the machine was busy."""
PREAMBLE = """\
# The change feed

Everything runs on one machine with {cores} cores: ZooKeeper, bookies, a node, the load and the
clients. The figures depend on the machine. `bench/README.md` says what each figure means. The parts
{recorded} are recorded results: they were measured once, on the machine of the others, and are not
measured again. The peer in catch-up was etcd's watch, in the same run.
"""


def _goal(
    part: str,
    name: str,
    title: str,
    must: float,
    aim: float,
    unit: str = "",
    *,
    at_least: bool = False,
    digits: int = 0,
) -> Goal:
    return Goal(
        title=title,
        value=lambda records: named(name, "").summary(records.find(part)),
        must=must,
        aim=aim,
        unit=unit,
        at_least=at_least,
        digits=digits,
    )


GOALS = (
    _goal(
        LOG,
        "changes_per_s",
        "changes a second into the log, as many as possible",
        10_000,
        30_000,
        at_least=True,
    ),
    _goal(LOG, "median_ms", "change to follower at 1,000 changes/s, median", 150, 60, " ms"),
    _goal(LOG, "p99_ms", "change to follower at 1,000 changes/s, p99", 500, 200, " ms"),
    _goal(
        FIRST_MARK,
        "first_mark_ms",
        "first mark after a loss, beside 5,000 changes/s",
        100,
        30,
        " ms",
    ),
    _goal(
        "take-over",
        "takeover_s",
        "take-over at 1,000,000 ledgers, 10,000 changes, beyond the scan",
        10,
        3,
        " s",
        digits=1,
    ),
    _goal(
        "behind",
        "known_s",
        "client 1,000,000 changes behind knows all of them",
        30,
        10,
        " s",
        digits=1,
    ),
    _goal("behind", "memory_mb", "its memory meanwhile", 250, 100, " MB"),
    _goal(
        "receipts",
        "stored_kb",
        "stored receipts of one-second checkpoints, completed in random order",
        1_000,
        10,
        " KB",
        digits=1,
    ),
    _goal(
        "catch-up",
        "times_the_watch",
        "catch-up of 100,000 changes, times the rate of etcd's watch",
        0.5,
        1,
        at_least=True,
        digits=1,
    ),
    _goal(
        "fsck",
        "times_sooner",
        "fsck --changed, 1,000 of 1,000,000 ledgers, times sooner than all",
        10,
        50,
        at_least=True,
    ),
)


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
