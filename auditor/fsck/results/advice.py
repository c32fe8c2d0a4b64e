"""Texts for operators: what a run found and what to do next, the most urgent first. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from auditor.fsck.levels import Level
from auditor.fsck.results.summary import Counts, Summary
from auditor.fsck.verdicts import Evidence, Finding, Grade

AWAY_SHOWN_MAX = 5
"""Number of bookies in the headline; those that most ledgers need come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """``title``: what was found, with its count. ``text``: what it means, and what helps."""

    title: str
    text: str


def advice_for(summary: Summary) -> list[Advice]:
    """Return the advice for a run. Empty if there is nothing to do."""
    return [
        Advice(title=title.format(count=f"{count:,}"), text=text)
        for count_of, title, text in _RULES
        if (count := count_of(summary))
    ]


def _grade(grade: Grade) -> Callable[[Summary], int]:
    return lambda summary: summary.counts.verdicts.get(grade.value, 0)


def _finding(*findings: Finding) -> Callable[[Summary], int]:
    """Return a function for the largest of these findings' counts. A sum would count a ledger once
    for each of its findings."""
    return lambda summary: max(summary.counts.findings.get(each.value, 0) for each in findings)


_RULES: tuple[tuple[Callable[[Summary], int], str, str], ...] = (
    (
        _grade(Grade.LOST),
        "Ledgers with entries of which no good copy is left: {count}",
        "Wipe, format or decommission no bookie now: a disk that is aside may hold the only copy. The evidence "
        "below names bookies and entries. Bring back bookies and disks that were taken away, then run fsck again; "
        "what stays lost has to come from a backup, and its readers have to be told.",
    ),
    (
        _grade(Grade.AT_RISK),
        "Ledgers with entries of which one copy is left: {count}",
        "Do not restart the bookies that hold it before the others are mended. Where copies are missing or damaged, "
        "bookmender fsck mark DIR --mark puts them into the daemon's queue, before all others; bookmender queue list "
        "says how far they are.",
    ),
    (
        _finding(Finding.MISSING, Finding.BAD_DIGEST, Finding.READ_ERROR),
        "Ledgers with copies that are missing, damaged or unreadable: {count} or more",
        "bookmender fsck mark DIR --mark gives them to the daemon, which copies them from the good ones. Where "
        "digests are wrong, or reads fail, on one bookie again and again, its disk is to be looked at.",
    ),
    (
        _finding(Finding.BOOKIE_GONE),
        "Ledgers that name a bookie that is not there: {count}",
        "bookmender bookie list says which are away. Start them again if they can be; after the recovery delay "
        "the daemon copies what they held.",
    ),
    (
        _finding(Finding.SUSPECT),
        "Ledgers whose copies differ although each has a right digest: {count}",
        "Nobody knows which copy is right, so nothing is mended by itself. A writer that was not fenced, or "
        "files put back from a backup, may have done it: compare the entries with what their application knows.",
    ),
    (
        _finding(Finding.UNREADABLE_METADATA),
        "Ledgers whose metadata cannot be read: {count}",
        "bookmender ledger show ID says what is wrong. Where an ACL shuts it away, whoever that admits (getAcl "
        "tells) may open it with setAcl. Damaged, bookmender ledger restore ID puts back what stood there before a "
        "write of ours. Metadata of a newer version needs a newer bookmender.",
    ),
    (
        _finding(Finding.END_UNPROVEN),
        "Ledgers that are not closed, and whose end cannot be proven: {count}",
        "Too many of the bookies that they were written to were wiped since: acknowledged entries at the end may be "
        "lost. A writer that is alive knows the end, and closes them. bookmender ledger show ID says what helps the others.",
    ),
    (
        _grade(Grade.UNKNOWN),
        "Ledgers of which nobody knows: {count}",
        "Some bookie did not answer, the metadata cannot be read, or an end cannot be proven; the evidence says "
        "which. See that the bookie answers, and run fsck again.",
    ),
    (
        _finding(Finding.MISPLACED),
        "Ledgers whose copies are placed against the policy: {count}",
        "With checks.repairs_placement = true the daemon's check of the placement marks them, and workers move "
        "them.",
    ),
    (
        _finding(Finding.IDLE_OPEN),
        "Open ledgers that nobody writes any more: {count}",
        "bookmender ledger idle lists them, bookmender ledger close ID closes one.",
    ),
    (
        _finding(Finding.STRAY),
        "Ledgers with copies on bookies that they do not name: {count}",
        "Bookies delete such copies by themselves, within a day. Where the evidence calls one the only copy, it is "
        "the cure: leave that bookie as it is until the ledger is mended.",
    ),
    (
        lambda summary: summary.left_wrong,
        "Ledgers that the time was not enough for, and that were wrong when they were looked at last: {count}",
        "bookmender fsck show DIR LEDGER says what was found of one. The next run looks at those first that were "
        "looked at the longest ago.",
    ),
    (
        lambda summary: summary.left,
        "Ledgers that the time was not enough for: {count}",
        "The next run takes them first.",
    ),
)


def counts_text(counts: Counts) -> str:
    """Return ``1,200 ledgers: 1,199 whole, 1 lost; of these also 2 suspect``: the grades, which add
    up, and findings that a grade does not show."""
    grades = _told(counts.verdicts, [each.value for each in reversed(Grade)])
    beside = _told(counts.findings, [Finding.SUSPECT.value, Finding.IDLE_OPEN.value])
    unit = "ledger" if counts.ledgers == 1 else "ledgers"
    told = f"{counts.ledgers:,} {unit}" + (f": {grades}" if grades else "")
    return f"{told}; of these also {beside}" if beside else told


def _told(counts: Mapping[str, int], names: Iterable[str]) -> str:
    return ", ".join(
        f"{counts[name]:,} {name.replace('_', ' ')}" for name in names if counts.get(name)
    )


def entries_text(each: Evidence) -> str:
    """Return ``entry 3``, ``entries 3 to 5`` or ``2 entries between 3 and 5``; empty if it is about
    no entry."""
    first, last = each.first_entry_id, each.last_entry_id
    if first < 0:
        return ""
    if first == last:
        return f"entry {first}"
    if each.entry_count == last - first + 1:
        return f"entries {first} to {last}"
    unit = "entry" if each.entry_count == 1 else "entries"
    return f"{each.entry_count:,} {unit} between {first} and {last}"


def tails_text(counts: Counts) -> str:
    """Return a text about open ledgers whose tail was not checked; empty if there are none."""
    count = counts.tails_unseen
    if not count:
        return ""
    whose, writers = (
        ("tail of 1 open ledger was", "its writer")
        if count == 1
        else (f"tails of {count:,} open ledgers were", "their writers")
    )
    return f"the {whose} left to {writers}: what comes after the last confirmed entry was not looked at"


def _out_of_reach(counts: Counts) -> str:
    """Return ``2 ledgers have entries that no running bookie has: start a:3181, b:3181``."""
    bookies = sorted(counts.away, key=lambda bookie: (-counts.away[bookie], bookie))
    more = len(bookies) - AWAY_SHOWN_MAX
    shown = ", ".join(bookies[:AWAY_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
    have = "ledger has" if counts.out_of_reach == 1 else "ledgers have"
    return f"{counts.out_of_reach:,} {have} entries that no running bookie has: start {shown}"


def headline(summary: Summary) -> str:
    """Return one sentence on the whole result."""
    counts = summary.counts
    verdicts: Mapping[str, int] = counts.verdicts
    if verdicts.get(Grade.LOST.value):
        return "Data is lost, as far as fsck can see."
    if counts.out_of_reach:
        return f"{_out_of_reach(counts)}; nothing is known to be lost."
    if verdicts.get(Grade.AT_RISK.value):
        return "Nothing is known to be lost, but some of it hangs on one copy."
    if summary.wrong:
        return "Nothing is known to be lost; some copies are not as they should be."
    if verdicts.get(Grade.UNKNOWN.value):
        return "Nothing is known to be wrong, but of some ledgers nobody knows."
    if summary.level is Level.METADATA:
        return "No copy was looked at; nothing in the metadata is wrong."
    if summary.left:
        return f"All is there of what was looked at, as far as this level looks; {summary.left:,} left."
    return "All is there, as far as this level looks."
