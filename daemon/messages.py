"""Text for people about blocked repairs: what blocks a ledger, and what to do.

Decisions in ``replication`` return a reason and facts (``replication.reasons``). This is the only
place that turns them into sentences and commands: a table has a text for each reason, and the facts
follow as a list. Texts may hold names and error messages from outside, so callers pass them through
``printable``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from daemon.words import shortened
from ledgers.model import BookieId
from replication.by_hand import CopyDoubt
from replication.copy_reader import Verdict
from replication.reasons import Blocked, Exclusion, Facts, Reason

BOOKIES_SHOWN_MAX = 5


@dataclass(frozen=True, slots=True)
class Message:
    """A text about a blocked ledger: the obstacle, advice, and what happens without an operator.

    ``what``: a clause without a full stop. ``advice``, ``outlook``: sentences; may be empty.
    """

    what: str
    advice: str = ""
    outlook: str = ""

    @property
    def text(self) -> str:
        """Return all of it as one text, without a full stop at the end."""
        return " ".join(filter(None, [f"{self.what}.", self.outlook, self.advice])).removesuffix(
            "."
        )


class Text(NamedTuple):
    """The text for a reason. A sentence that names a fact in braces is left out without this fact.

    ``what``: the obstacle, if the errors do not say it. ``advice``: sentences; of those in a tuple
    only the first that is not left out.
    """

    what: str
    advice: tuple[str | tuple[str, ...], ...] = ()
    outlook: str = ""


CANNOT_CLOSE = (
    "If its writer runs, the writer can close it. No other client can, not even Java's: start the "
    "bookies that it misses, or delete it if its entries are not needed."
)
"""Advice for an open ledger with an ack quorum below 1."""
CLOSE = (
    "`bookmender ledger close {id} --accept-loss --yes` closes the ledger after the last entry "
    "that is left."
)
UNFINISHED = Text(
    "an open fragment cannot be copied",
    outlook="A worker finishes the recovery before it copies anything.",
)
"""An open fragment, if a recovery was begun."""
ADD_A_BOOKIE = (
    ("Start {missing}, or add a bookie.", "Add a bookie."),
    "Or end the maintenance: `bookmender bookie maintenance {in_maintenance_id} --end`.",
    "Or cancel the drain: `bookmender bookie drain {draining_id} --cancel`.",
)
TRUST = (
    "The cookies of all bookies are newer than the ledger. If ZooKeeper was imported, or bookie "
    "ids changed, and no disk was erased, run `bookmender bookie trust-identities`."
)

TEXTS = {
    Reason.OPEN_LEDGER_GRACE: Text(
        "its open last fragment is left to its writer for the open-ledger grace",
        outlook="Then a worker fences, recovers and closes it, and repairs its copies.",
    ),
    Reason.WRITER_ALIVE: Text(
        "its writer is still writing",
        outlook="When the writer stops, or after the last grace, the ledger is fenced, recovered "
        "and closed.",
    ),
    Reason.OPEN_FRAGMENT: Text(
        "an open fragment cannot be copied",
        (
            "Its writer must close it. If the writer has stopped, run `bookmender ledger close "
            "{id} --yes`; add `--force` if that is not certain.",
            "`bookmender bookie drain {draining_id} --fence-open` closes it, too.",
        ),
    ),
    Reason.RECOVERY_UNENDED: Text(
        "an open fragment cannot be copied, and its recovery was not finished",
        (
            "Run `bookmender ledger close {id} --yes`.",
            "`bookmender bookie drain {draining_id} --fence-open` closes it, too.",
        ),
    ),
    Reason.NO_COPY: Text(
        "no bookie that answers has a good copy of some entries", ("Start {absent}.",)
    ),
    Reason.NO_TARGET: Text("no bookie may receive the copy", ADD_A_BOOKIE),
    Reason.MISPLACED: Text(
        "every copy exists, but no bookie improves the placement",
        ("Add a bookie where the placement policy needs one.",),
    ),
    Reason.NO_ANSWER: Text("a bookie did not answer"),
    Reason.RECOVERY_FAILED: Text("it could not be recovered"),
    Reason.END_DAMAGED: Text(
        "an entry at its end has damaged copies only",
        (
            "If no bookie will ever return a good copy, `bookmender ledger close {id} "
            "--accept-loss --force` shows which entries would be given up. With `--yes` it closes "
            "the ledger before these entries.",
        ),
    ),
    Reason.NO_COVERAGE: Text(
        "too few bookies answer to find its end", ("Start enough of: {missing}.",)
    ),
    Reason.END_UNPROVEN: Text(
        "its end cannot be proven",
        (
            (
                "Start enough of {needed}, even without their data: the ledger cannot be closed "
                f"before. If its end still cannot be proven then, {CLOSE}",
                f"Start {{unresponsive}}. If they never return, {CLOSE}",
                CLOSE,
            ),
        ),
    ),
    Reason.CORRUPT_METADATA: Text(
        "its metadata is damaged or of an unknown version",
        (
            "`bookmender ledger restore {id}` lists earlier metadata, if it was written on this "
            "host.",
        ),
    ),
    Reason.ACCESS_DENIED: Text(
        "its metadata cannot be read",
        ("If an ACL denies access, a ZooKeeper user with permission can change it with `setAcl`.",),
    ),
    Reason.WRITE_REFUSED: Text(
        "ZooKeeper refuses its new metadata",
        (
            "Raise zookeeper.request_bytes_max ({request_bytes_max}) on all nodes if "
            "jute.maxbuffer of the servers allows more.",
        ),
    ),
    Reason.DIGEST_SUSPECT: Text(
        "every copy fails its digest", ("Check the password and the digest type of the ledger.",)
    ),
    Reason.CONFLICTS: Text("its metadata or its bookies changed in each round of the repair"),
    Reason.MAINTENANCE: Text(
        "it waits for bookies in maintenance",
        outlook="The repair continues when these bookies are back, or when the maintenance window "
        "ends.",
    ),
    Reason.HOLD: Text(
        "it is not closed, and a safety hold forbids fencing", ("See `bookmender hold`.",)
    ),
    Reason.LEFT_TO_OTHERS: Text("this node cannot repair it, but another node can"),
    Reason.JOURNAL: Text("the journal of this host cannot be written"),
}
ERRORS_SAY_IT = (
    Reason.RECOVERY_FAILED,
    Reason.END_DAMAGED,
    Reason.END_UNPROVEN,
    Reason.CORRUPT_METADATA,
    Reason.DIGEST_SUSPECT,
    Reason.WRITE_REFUSED,
    Reason.JOURNAL,
)
"""Their errors say what the text says."""
STATES = {
    "absent": "not registered",
    "decommissioned": "decommissioned",
    "unresponsive": "not answering",
    "superseded": "another bookie is registered at the address",
    "reformatted": "reformatted after the ledger was created",
    "lacking": "lacking entries",
    "draining": "draining",
    "in_maintenance": "in maintenance",
}
EXCLUSIONS = {
    Exclusion.MEMBER: "already in the ensemble",
    Exclusion.REFUSED: "refused the ledger",
    Exclusion.SHORT_OF_SPACE: "short of disk space",
    Exclusion.DRAINING: "draining",
    Exclusion.MAINTENANCE: "in maintenance",
    Exclusion.QUARANTINED: "unresponsive",
    Exclusion.ISOLATED: "outside the isolation groups",
    Exclusion.NOT_LOCAL: "not local (replication.target is local)",
}


def message(ledger_id: int, blocked: Blocked) -> Message:
    """Return the message for a ledger, with everything that blocks it."""
    messages = [_message(ledger_id, each) for each in (blocked, *blocked.besides)]
    return Message(
        what="; also, ".join(dict.fromkeys(each.what for each in messages)),
        advice=" ".join(filter(None, dict.fromkeys(each.advice for each in messages))),
        outlook=" ".join(filter(None, dict.fromkeys(each.outlook for each in messages))),
    )


def blocked_text(ledger_id: int, blocked: Blocked) -> str:
    """Return ``<reason>: <what>. <advice>``, without a full stop at the end."""
    return f"{blocked.reason.value}: {message(ledger_id, blocked).text}"


def blocked_record(ledger_id: int, blocked: Blocked) -> dict[str, Any]:
    """Return the fields that every JSON output has for a blocked ledger."""
    record = blocked.to_record()
    return {
        "reason": record["reason"],
        "facts": record.get("facts", {}),
        "besides": record.get("besides", []),
        "detail": message(ledger_id, blocked).text,
    }


def _message(ledger_id: int, blocked: Blocked) -> Message:
    reason, facts = blocked.reason, blocked.facts
    text, errors = TEXTS[reason], ": ".join(facts.errors)
    if reason is Reason.OPEN_FRAGMENT and facts.is_in_recovery:
        text = UNFINISHED
    elif reason is Reason.END_UNPROVEN and facts.ack_quorum is not None and facts.ack_quorum < 1:
        text = text._replace(advice=(CANNOT_CLOSE,))
    elif reason is Reason.NO_TARGET and facts.ack_quorum is not None:
        what = (
            f"recovery must store the last entries on {facts.ack_quorum} bookies (the ack quorum)"
        )
        text = text._replace(what=f"{what}, and no bookie may join")
    what = text.what
    if errors:
        what = errors if reason in ERRORS_SAY_IT else f"{what}: {errors}"
    told = list(_facts(facts))
    may_return = (*facts.absent, *facts.decommissioned, *facts.in_maintenance)
    if reason is Reason.NO_COPY and not may_return and facts.withheld_count is None:
        told.append("no absent bookie should have one")
    values = _values(ledger_id, facts)
    advice = []
    for either in text.advice:
        choices = (either,) if isinstance(either, str) else either
        advice += [each.format_map(values) for each in choices if _is_known(each, values)][:1]
    return Message(
        what + (f" ({'; '.join(told)})" if told else ""),
        " ".join([*advice, *([TRUST] if facts.are_all_reformatted else [])]),
        text.outlook,
    )


def _is_known(sentence: str, values: dict[str, str]) -> bool:
    return all(value or f"{{{name}}}" not in sentence for name, value in values.items())


def _values(ledger_id: int, facts: Facts) -> dict[str, str]:
    """Return what sentences of the table can name. Empty: not known."""
    bookies = {
        "absent": facts.absent,
        "missing": (
            *facts.absent,
            *facts.decommissioned,
            *facts.superseded,
            *facts.unresponsive,
        ),
        "needed": facts.needed,
        "unresponsive": facts.unresponsive,
        "draining": facts.draining,
        "in_maintenance": facts.in_maintenance,
    }
    return {
        "id": str(ledger_id),
        "request_bytes_max": f"{facts.request_bytes_max:,}" if facts.request_bytes_max else "",
        **{name: _names(each) for name, each in bookies.items()},
        # The bookie as an argument of a command; ID if there are several.
        **{
            f"{name}_id": str(each[0]) if len(each) == 1 else "ID" if each else ""
            for name, each in bookies.items()
        },
    }


def _facts(facts: Facts) -> Iterator[str]:
    """Yield the known facts, for example ``not registered: b1, b2``."""
    if facts.entry_ids or facts.entry_count:
        yield _entries(facts)
    for state, text in STATES.items():
        if bookies := getattr(facts, state):
            yield f"{text}: {_names(bookies)}"
    if facts.replaced is not None:
        yield f"copy of {facts.replaced}"
    if facts.local is not None:
        yield f"replication.target is local, and its bookie is {facts.local}"
    if facts.excluded:
        counts = ", ".join(f"{count} {EXCLUSIONS[why]}" for why, count in facts.excluded)
        yield f"writable bookies that are excluded: {counts}"
    elif facts.excluded is not None:
        yield "no bookie is writable"
    if facts.withheld_count is not None:
        count = f"{facts.withheld_count:,}" if facts.withheld_count else "not counted"
        yield f"copies of other entries that wait: {count}"
    if facts.grace_count:
        yield f"grace {facts.grace_count} of {facts.grace_count_max}"
    if facts.round_count:
        yield f"{facts.round_count} rounds"
    if facts.metadata_bytes is not None:
        yield f"{facts.metadata_bytes:,} bytes"
    if facts.is_in_recovery:
        yield "a recovery was begun and not finished"
    if facts.is_end_doubtful:
        yield "its end may not be provable"
    if facts.are_others_unasked:
        yield "bookies of other fragments were not asked"
    if facts.comment:
        yield facts.comment


def _names(bookies: Iterable[BookieId]) -> str:
    return shortened(list(dict.fromkeys(bookies)), at_most=BOOKIES_SHOWN_MAX)


def _entries(facts: Facts) -> str:
    """Return ``entry 4``, ``entries 4, 7`` or ``more than 1,000 entries (4, 7, …)``."""
    listed = ", ".join(map(str, facts.entry_ids))
    if not listed:
        return f"{facts.entry_count:,} entries"
    if not facts.has_more_entries and facts.entry_count <= len(facts.entry_ids):
        return f"entry {listed}" if len(facts.entry_ids) == 1 else f"entries {listed}"
    more = "more than " if facts.has_more_entries else ""
    return f"{more}{facts.entry_count:,} entries ({listed}, …)"


# --- Related texts --------------------------------------------------------------------------------


def end_doubt_text(facts: Facts) -> str:
    """Return why the end of an open ledger may not be provable."""
    doubts = "; ".join(each for each in _facts(facts) if not each.startswith("its end"))
    text = "its end may not be provable" + (f" ({doubts})" if doubts else "")
    return f"{text}. {TRUST}" if facts.are_all_reformatted else text


def earlier_metadata_hint(ledger_id: int) -> str:
    """Return what helps if metadata cannot be read."""
    return (
        f"`bookmender ledger restore {ledger_id}` lists earlier metadata, if it was written on "
        "this host"
    )


def copy_doubt_text(ledger_id: int, doubt: CopyDoubt | Blocked) -> str:
    """Return what speaks against restoring metadata."""
    if isinstance(doubt, Blocked):
        return f"the copies cannot be checked: {blocked_text(ledger_id, doubt)}"
    if doubt.entry_count is None:
        state = "is not registered" if doubt.verdict is Verdict.BOOKIE_ABSENT else "lacks entries"
        return f"{doubt.bookie} of the open last fragment {state}"
    entries = f"{doubt.entry_count:,} entries from {doubt.first_entry_id} to {doubt.last_entry_id}"
    match doubt.verdict:
        case Verdict.BOOKIE_ABSENT:
            return f"{doubt.bookie} is not registered: {entries} would lack a copy"
        case Verdict.IN_MAINTENANCE:
            return f"{doubt.bookie} is in maintenance, and may not have its {entries}"
        case Verdict.MISSING:
            return f"{doubt.bookie} lacks {doubt.bad_count:,} of its {entries}"
        case _:
            return f"{doubt.bookie} did not answer for its {entries}"
