"""Sentences on the result of a run, and what to do next, for the terminal and the report. Pure."""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from auditor.fsck.options import Level
from auditor.fsck.results.summary import Counts, Summary
from auditor.fsck.verdicts import Finding, Grade
from daemon.words import counted

BOOKIES_SHOWN_MAX = 5
"""Number of bookies in the headline; those that most ledgers need come first."""


class Advice(NamedTuple):
    """``title``: what was found, with its count. ``text``: what it means, and what to do."""

    title: str
    text: str


def headline(summary: Summary) -> str:
    """Return one sentence on the whole result."""
    counts = summary.counts
    verdicts: Mapping[str, int] = counts.verdicts
    if verdicts.get(Grade.LOST.value):
        return "Data is lost: fsck found no good copy of some entries."
    if counts.out_of_reach:
        # "2 ledgers have entries that no running bookie stores: start a:3181, b:3181; …"
        bookies = sorted(counts.away, key=lambda bookie: (-counts.away[bookie], bookie))
        more = len(bookies) - BOOKIES_SHOWN_MAX
        start = ", ".join(bookies[:BOOKIES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
        have = "ledger has" if counts.out_of_reach == 1 else "ledgers have"
        return (
            f"{counts.out_of_reach:,} {have} entries that no running bookie stores: start {start}; "
            "nothing is known to be lost."
        )
    if verdicts.get(Grade.AT_RISK.value):
        return "Nothing is known to be lost, but some entries have only one good copy."
    if summary.wrong:
        return "Nothing is known to be lost, but some copies are missing or bad."
    if verdicts.get(Grade.UNKNOWN.value) or summary.hidden:
        return "Nothing is known to be wrong, but some ledgers could not be checked completely."
    if summary.level is Level.METADATA:
        return "The metadata is fine. No copy was read at this level."
    left = f" {summary.left:,} ledgers were not checked." if summary.left else ""
    return f"All checked ledgers are whole, as far as level {summary.level.value} shows.{left}"


def counts_text(counts: Counts) -> str:
    """Return ``1,200 ledgers: 1,199 whole, 1 lost; of these also 2 suspect``: the grades, which add
    up, and findings that a grade does not show."""
    grades = _listed(counts.verdicts, [each.value for each in reversed(Grade)])
    beside = _listed(counts.findings, [Finding.SUSPECT.value, Finding.IDLE_OPEN.value])
    text = counted(counts.ledgers, "ledger") + (f": {grades}" if grades else "")
    return f"{text}; of these also {beside}" if beside else text


def _listed(counts: Mapping[str, int], names: Iterable[str]) -> str:
    return ", ".join(
        f"{counts[name]:,} {name.replace('_', ' ')}" for name in names if counts.get(name)
    )


def tails_text(counts: Counts) -> str:
    """Return a sentence on open ledgers whose tail was not checked; empty if there are none."""
    if not counts.tails_unseen:
        return ""
    ledgers = counted(counts.tails_unseen, "open ledger")
    return f"entries after the last confirmed one were not checked in {ledgers}"


def advice_for(summary: Summary) -> list[Advice]:
    """Return the advice for a run, the most urgent first. Empty if there is nothing to do."""
    count_by_name: dict[Grade | Finding | str, int] = {
        **{Grade(name): count for name, count in summary.counts.verdicts.items()},
        **{Finding(name): count for name, count in summary.counts.findings.items()},
        HIDDEN: len(summary.hidden),
        LEFT_WRONG: summary.left_wrong,
        LEFT: summary.left,
    }
    # The largest of several counts: a sum would count a ledger once for each of its findings.
    return [
        Advice(title=f"{title}: {count:,}", text=text)
        for names, (title, text) in _ADVICE.items()
        if (count := max(count_by_name.get(name, 0) for name in names))
    ]


HIDDEN, LEFT_WRONG, LEFT = "hidden", "left_wrong", "left"

_ADVICE: Final[Mapping[tuple[Grade | Finding | str, ...], tuple[str, str]]] = {
    (Grade.LOST,): (
        "Ledgers with entries that have no good copy left",
        "Do not wipe, format or decommission any bookie: a removed disk may hold the only copy. "
        "Bring back absent bookies and disks, then run fsck again. "
        "Entries that stay lost must come from a backup.",
    ),
    (Grade.AT_RISK,): (
        "Ledgers with entries that have one good copy left",
        "Do not restart the bookies that store it before these ledgers are repaired. Mark missing "
        "and damaged copies with bookmender fsck mark DIR --mark; workers repair these ledgers "
        "first. bookmender queue shows the progress.",
    ),
    (Finding.MISSING, Finding.BAD_DIGEST, Finding.READ_ERROR): (
        "Ledgers with missing, damaged or unreadable copies, at least",
        "Mark them with bookmender fsck mark DIR --mark; workers copy the entries from good "
        "copies. If one bookie has many damaged or unreadable copies, check its disk.",
    ),
    (Finding.BOOKIE_GONE,): (
        "Ledgers with copies on absent bookies",
        "bookmender bookie list shows the absent bookies. Start them if possible. "
        "After the recovery delay workers copy their entries.",
    ),
    (Finding.SUSPECT,): (
        "Ledgers whose copies differ although their digests are correct",
        "fsck cannot know which copy is right, so nothing is repaired. Possible causes are a "
        "writer that was not fenced, and files restored from a backup. Compare the entries with "
        "the application's data.",
    ),
    (Finding.UNREADABLE_METADATA,): (
        "Ledgers with unreadable metadata",
        "bookmender ledger show ID shows the reason. If an ACL denies access, a user with "
        "permission can change it with setAcl (see getAcl). For damaged metadata, bookmender "
        "ledger restore ID puts back what bookmender last replaced. Metadata of a newer version "
        "needs a newer bookmender.",
    ),
    (HIDDEN,): (
        "Directories of ledgers that ACLs hide, at least",
        "Their ledgers were not checked. bookmender status and summary.json name them. Grant the "
        "user of fsck read access with setAcl, and run fsck again.",
    ),
    (Finding.END_UNPROVEN,): (
        "Ledgers that are not closed and whose end cannot be proven",
        "Too many bookies of their last ensemble were reformatted, so acknowledged entries at the "
        "end may be lost. A running writer knows the end and closes its ledger. For the others, "
        "bookmender ledger show ID shows what helps.",
    ),
    (Grade.UNKNOWN,): (
        "Ledgers that could not be checked completely",
        "A bookie did not answer, the metadata is unreadable, or the end cannot be proven; the "
        "evidence shows which. Make the bookie answer, and run fsck again.",
    ),
    (Finding.MISPLACED,): (
        "Ledgers whose copies break the placement policy",
        "With checks.repairs_placement = true the placement check marks them, and workers move "
        "the copies.",
    ),
    (Finding.IDLE_OPEN,): (
        "Open ledgers that no client writes any more",
        "bookmender ledger idle lists them. bookmender ledger close ID closes one.",
    ),
    (Finding.STRAY,): (
        "Ledgers with copies on bookies that their metadata does not name",
        "Bookies delete such copies within a day. If the evidence says only_copy, leave that "
        "bookie unchanged until the ledger is repaired.",
    ),
    (LEFT_WRONG,): (
        "Ledgers that were not checked in time, and that the last check found wrong",
        "bookmender fsck show DIR LEDGER shows what was found. The next run begins with the least "
        "recently checked ledgers.",
    ),
    (LEFT,): (
        "Ledgers that were not checked in time",
        "The next run checks them first.",
    ),
}
"""What was found, and what to do. The most urgent comes first."""
