"""What speaks against metadata that is to be written as it is: bookies that it names without the
copies.

The words are an operator's, who is asked whether to write it all the same: one sentence a bookie,
and kind of doubt.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from replication.planning.check import IndexFinding, Verdict
from replication.planning.survey import OpenEnd, Survey
from replication.reasons import Blocked

_TOLD: Mapping[Verdict, str] = {
    Verdict.LOST: "{bookie} is not registered: the {count} entries from {first} to {last} would miss a copy",
    Verdict.AWAY: "{bookie} is under maintenance: nobody knows if it holds its {count} entries from {first} to {last}",
    Verdict.MISSING: "{bookie} lacks {bad} of the {count} entries from {first} to {last} that it would be named for",
    Verdict.UNKNOWN: "{bookie} did not say if it holds its {count} entries from {first} to {last}",
}
"""Draining bookies are asked as all others are; see ``Restorer``."""


def copy_doubts(
    surveyed: Survey | OpenEnd | Blocked, closed_part: Survey | None = None
) -> list[str]:
    """``closed_part``: of an ``OpenEnd``, what can be surveyed nonetheless."""
    match surveyed:
        case Blocked() as blocked:
            return [f"what its bookies hold cannot be told: {blocked.detail}"]
        case OpenEnd() as found:
            gone = [
                f"{bookie} of its open last fragment is not registered" for bookie in found.leaving
            ]
            lacking = [
                f"{bookie} lacks entries of its open last fragment" for bookie in found.lacking
            ]
            return [*gone, *lacking, *(_told(closed_part.findings) if closed_part else [])]
        case Survey() as survey:
            return _told(survey.findings)


def _told(findings: Sequence[IndexFinding]) -> list[str]:
    doubted = defaultdict[tuple[str, Verdict], list[IndexFinding]](list)
    for finding in findings:
        if finding.verdict in _TOLD and finding.entries:
            doubted[finding.bookie, finding.verdict].append(finding)
    return [
        _TOLD[verdict].format(
            bookie=bookie,
            bad=sum(each.bad_count for each in found),
            count=sum(len(each.entries) for each in found),
            first=min(each.entries[0] for each in found),
            last=max(each.entries[-1] for each in found),
        )
        for (bookie, verdict), found in doubted.items()
    ]
