"""What ``bookmender status`` says of its verdict in a line: why, and what to do or think about it.
Pure."""

from collections.abc import Sequence

from auditor.fsck.results.summary import Summary
from auditor.fsck.verdicts import Grade
from auditor.unavailable_ledgers import UnavailableLedgers
from daemon.cli.progress import counted, duration_text
from daemon.status.state import VERDICTS, Status
from replication.nodes import Role

LEDGERS_SHOWN_MAX = 5
BOOKIES_SHOWN_MAX = 5


def verdict_text(found: Status, *, now_ms: int) -> str:
    whys = [
        _why(found, now_ms=now_ms),
        _unavailable(found) if found.verdict != "copies-away" else "",
        _no_auditor(found) if found.leader is None and found.has_bookies else "",
        "auto-recovery is disabled" if found.is_disabled else "",
        *([_drains(found), *_fsck_doubts(found)] if found.exit_code == 0 else []),
    ]
    told = "; ".join(why for why in whys if why)
    return f"{found.verdict} ({told})" if told else found.verdict


def _why(found: Status, *, now_ms: int) -> str:
    match found.verdict:
        case "no-bookies":
            return VERDICTS["no-bookies"]
        case "unattended":
            return "nobody repairs what is marked"
        case "indexing":
            return "the leader has not read every ledger's metadata yet: what misses copies may yet be found"
        case "repairing":
            return _waiting_for_windows(found, now_ms=now_ms)
        case "copies-away":
            on_purpose = _on_purpose(found, now_ms=now_ms) if found.on_purpose else ""
            return "; ".join(filter(None, (_unavailable(found), on_purpose)))
        case "maintenance":
            return _maintenance(found, now_ms=now_ms)
        case "bookies-away":
            return _away(found, now_ms=now_ms)
        case "bookies-wiped":
            return f"set up anew, and may have lost what they had: {', '.join(found.wiped)}"
        case "ends-unproven":
            return f"an operator is needed for the end of {counted(len(found.unproven), 'ledger')}"
        case "none-writable":
            return "no bookie takes writes: they are read-only, or away"
        case _:
            return ""


def _no_auditor(found: Status) -> str:
    if any(node.role is Role.AUDITOR for node in found.nodes):
        return "no auditor leads yet, though a node stands for it: look again in some seconds"
    text = "no auditor is running, ours or Java's: what is lost is not noticed"
    if found.nodes:
        return f"{text}; start a node with auditor.enabled = true"
    return f"{text}; start a node with bookmender daemon"


def _away(found: Status, *, now_ms: int) -> str:
    away = counted(len(found.away), "bookie")
    pending = found.auditing.pending
    if not pending:
        return f"{away} away: lost or not, nobody tells"
    return f"{away} away, the next one {pending[0].to_text(now_ms=now_ms)}"


def _unavailable(found: Status) -> str:
    """Empty where there are none; else with some of them, and whom to start."""
    unavailable = found.auditing.unavailable
    if unavailable is None or not unavailable.count:
        return ""
    least = "" if found.auditing.are_all_named else "at least "
    has = "has" if unavailable.count == 1 else "have"
    text = (
        f"{least}{counted(unavailable.count, 'ledger')} {has} entries whose every copy is on a bookie that is away: "
        "nobody can read these until one of their bookies is back"
    )
    return "".join((text, _which(unavailable), _whom_to_start(unavailable)))


def _which(unavailable: UnavailableLedgers) -> str:
    """Empty where an earlier release counts them."""
    if not unavailable.first:
        return ""
    shown = unavailable.first[:LEDGERS_SHOWN_MAX]
    more = unavailable.count - len(shown)
    return f": ledger {', '.join(map(str, shown))}{f' and {more:,} more' if more > 0 else ''}"


def _whom_to_start(unavailable: UnavailableLedgers) -> str:
    """The bookies that are enough for most of them first; of bookies each of which is enough for
    all, any."""
    ordered = sorted(unavailable.restored_by.items(), key=lambda each: (-each[1], each[0]))
    enough = [bookie for bookie, count in ordered if count == unavailable.count]
    some = [f"{bookie} (enough for {count:,})" for bookie, count in ordered if count]
    if enough:
        return f"; start {_any_of(enough)}"
    if some:
        return f"; start {_listed(some)}"
    return f"; start {_listed([bookie for bookie, _ in ordered])}" if ordered else ""


def _any_of(bookies: Sequence[str]) -> str:
    return bookies[0] if len(bookies) == 1 else f"one of {_listed(bookies)}"


def _listed(bookies: Sequence[str]) -> str:
    more = ", …" if len(bookies) > BOOKIES_SHOWN_MAX else ""
    return ", ".join(bookies[:BOOKIES_SHOWN_MAX]) + more


def _on_purpose(found: Status, *, now_ms: int) -> str:
    count, until_ms = len(found.on_purpose), found.on_purpose_until_ms
    assert until_ms is not None
    left = duration_text(max(0, until_ms - now_ms) / 1000)
    are = "is" if count == 1 else "are"
    return f"{counted(count, 'bookie')} {are} away on purpose, for another {left} at most"


def _maintenance(found: Status, *, now_ms: int) -> str:
    """As long as nobody knows that no ledger names a bookie, its ledgers count as a copy short."""
    count, text = len(found.on_purpose), _on_purpose(found, now_ms=now_ms)
    named_count = sum(not found.auditing.is_named_by_none(row.bookie) for row in found.on_purpose)
    if not named_count:
        return f"{text}: no ledger names {'it' if count == 1 else 'them'}, and nothing is affected"
    if found.may_lack_copies:
        why = (
            "no node of ours leads"
            if found.leader_node is None
            else "the leader has not counted yet"
        )
        return f"{text}: whether each entry has a copy that is there is not known, as {why}"
    if named_count == 1 < count:
        return f"{text}: ledgers of 1 of them are a copy short meanwhile"
    if named_count == 1:
        return f"{text}: its ledgers are a copy short meanwhile"
    whose = "their ledgers" if named_count == count else f"ledgers of {named_count} of them"
    return f"{text}: {whose} are short of copies meanwhile, but each entry has one that is there"


def _waiting_for_windows(found: Status, *, now_ms: int) -> str:
    """What is marked for a bookie that is lost misses copies on others, too, which are away on
    purpose."""
    notes = found.windows_waited_for
    if not notes:
        return ""
    left_ms = min(note.next_try_ms for note in notes) - now_ms
    when = f", the next one in {duration_text(left_ms / 1000)}" if left_ms > 0 else ""
    return f"all that is left waits for maintenance windows to end{when}: bookmender bookie maintenance lists them"


def _drains(found: Status) -> str:
    """What is under way beside all that is well; empty where nothing is left of it."""
    unfinished = [
        row.progress
        for row in found.ordered
        if row.drain is not None and (row.progress is None or not row.progress.is_drained)
    ]
    if not unfinished:
        return ""
    who = f"{counted(len(unfinished), 'bookie')} {'drains' if len(unfinished) == 1 else 'drain'}"
    told = [progress for progress in unfinished if progress is not None]
    if len(told) < len(unfinished):
        return f"{who}: how many ledgers are left is not known yet"
    left = sum(progress.ledgers_left for progress in told)
    if not left:
        return f"{who}: no ledger left but those that cannot be read"
    most = counted(sum(progress.ledgers_most for progress in told), "ledger")
    return f"{who}: {left:,} of {most} left"


def _fsck_doubts(found: Status) -> list[str]:
    """What fsck found changes no verdict, as it may be mended by now; but nobody is to overlook
    it."""
    doubts = [_doubts("the last fsck", found.fsck), _doubts("a closer fsck", found.fsck_closer)]
    return [each for each in doubts if each]


def _doubts(run: str, summary: Summary | None) -> str:
    if summary is None:
        return ""
    unknown_count = summary.counts.verdicts.get(Grade.UNKNOWN.value, 0)
    texts = []
    if summary.wrong:
        texts.append(f"{run} found {counted(summary.wrong, 'ledger')} wrong, {_marked(summary)}")
    if unknown_count:
        texts.append(
            f"{run} could not tell of {counted(unknown_count, 'ledger')}: "
            "its report says why; see that every bookie answers, and run it again"
        )
    return "; ".join(texts)


def _marked(summary: Summary) -> str:
    """What became of those that it found wrong, where none is marked now: whether they are mended
    no mark tells."""
    marked = summary.marked or 0
    unmarked = summary.wrong - marked
    rest = "bookmender fsck mark DIR says which can be mended"
    if not marked:
        return f"none of them marked since: {rest}"
    told = f"{marked:,} of them marked since, none any more: another fsck run tells whether they are mended"
    return f"{told}; {unmarked:,} never: {rest}" if unmarked > 0 else told
