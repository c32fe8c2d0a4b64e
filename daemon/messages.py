"""Text for people about blocked repairs: what blocks a ledger, and what to do.

Decisions in ``replication`` return a reason and facts (``replication.reasons``). This is the only
place that turns them into sentences and commands. Texts may hold names and error messages from
outside, so callers pass them through ``printable``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

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


def message(ledger_id: int, blocked: Blocked) -> Message:
    """Return the message for a ledger, with everything that blocks it."""
    parts = (blocked, *blocked.besides)
    without_copy = [each.facts for each in parts if each.reason is Reason.NO_COPY]
    messages = [
        *([_no_copies(without_copy)] if without_copy else []),  # they rank first
        *(
            _message(ledger_id, each.reason, each.facts)
            for each in parts
            if each.reason is not Reason.NO_COPY
        ),
    ]
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


def _message(ledger_id: int, reason: Reason, facts: Facts) -> Message:
    """Return the message for one reason. Each member of ``Reason`` has a branch."""
    errors = "; ".join(facts.errors)
    match reason:
        case Reason.OPEN_LEDGER_GRACE:
            return _open_ledger_grace(facts)
        case Reason.WRITER_ALIVE:
            where = _where(facts, "absent", "lacking")
            return Message(
                f"its writer is still writing{where}; grace {facts.grace_count} of "
                f"{facts.grace_count_max}",
                outlook="When the writer stops, or after the last grace, the ledger is fenced, "
                "recovered and closed.",
            )
        case Reason.OPEN_FRAGMENT:
            return _open_fragment(ledger_id, facts)
        case Reason.RECOVERY_UNENDED:
            drain = _commands(facts.draining, "bookmender bookie drain {} --fence-open")
            return Message(
                "an open fragment cannot be copied, and its recovery was not "
                f"finished{_where(facts, 'draining')}",
                f"Run {drain} or `bookmender ledger close {ledger_id} --yes`.",
            )
        case Reason.NO_COPY:
            return _no_copies([facts])
        case Reason.NO_TARGET:
            return _no_target(facts)
        case Reason.MISPLACED:
            start = f"from entry {facts.entry_ids[0]} on " if facts.entry_ids else ""
            why = f": {errors}" if errors else ""
            return Message(
                f"{start}every copy exists, but no bookie improves the placement{why}",
                "Add a bookie where the placement policy needs one.",
            )
        case Reason.NO_ANSWER:
            return _no_answer(facts)
        case Reason.RECOVERY_FAILED:
            return Message(
                _with_untrusted(facts, otherwise="it could not be recovered"),
                _trust(facts).strip(),
            )
        case Reason.END_DAMAGED:
            return _end_damaged(ledger_id, facts)
        case Reason.NO_COVERAGE:
            missing = (*facts.absent, *facts.decommissioned, *facts.superseded)
            where = _where(facts, "absent", "decommissioned", "superseded", "reformatted")
            # The error lists the replies. The missing bookies are enough, if they are known.
            is_known = bool(missing) or not errors
            what = "too few bookies answer to find its end" if is_known else errors
            start = f"Start enough of: {_names(missing)}." if missing else ""
            return Message(f"{what}{where}", f"{start}{_trust(facts)}".strip())
        case Reason.END_UNPROVEN:
            return _end_unproven(ledger_id, facts)
        case Reason.CORRUPT_METADATA:
            what = errors or "its metadata is damaged or of an unknown version"
            return Message(what, f"{earlier_metadata_hint(ledger_id)}.")
        case Reason.ACCESS_DENIED:
            return Message(
                "its metadata cannot be read" + (f": {errors}" if errors else ""),
                "If an ACL denies access, a ZooKeeper user with permission can change it with "
                "`setAcl`.",
            )
        case Reason.WRITE_REFUSED:
            return _write_refused(facts)
        case Reason.DIGEST_SUSPECT:
            return Message(
                errors or "every copy fails its digest",
                "Check the password and the digest type of the ledger.",
            )
        case Reason.CONFLICTS:
            return Message(
                f"its metadata or its bookies changed in each of {facts.round_count} rounds"
            )
        case Reason.MAINTENANCE:
            comment = f": {facts.comment}" if facts.comment else ""
            named = f": {_names(facts.in_maintenance)}" if facts.in_maintenance else ""
            what = f"bookies in maintenance{named}{comment}"
            return Message(
                f"{errors}; {what}" if errors else what,
                outlook="The repair continues when these bookies are back, or when the "
                "maintenance window ends.",
            )
        case Reason.HOLD:
            comment = f" ({facts.comment})" if facts.comment else ""
            return Message(
                f"it is not closed, and a safety hold forbids fencing{comment}",
                "See `bookmender hold`.",
            )
        case Reason.LEFT_TO_OTHERS:
            return _left_to_others(facts)
        case Reason.JOURNAL:
            return Message(errors or "the journal of this host cannot be written")
        case _:
            assert_never(reason)


def _open_ledger_grace(facts: Facts) -> Message:
    entry = f"entry {facts.entry_ids[0]} has too few copies; " if facts.entry_ids else ""
    states = ["absent", "lacking", "draining"]
    doubt = ""
    if facts.is_end_doubtful:
        states += ["decommissioned", "superseded", "reformatted"]
        doubt = " Its end may not be provable."
    what, steps = "its open last fragment is left to its writer for", "fences, recovers and closes"
    if facts.is_in_recovery:
        what, steps = "its recovery is not finished, and waits for", "recovers and closes"
    why = f"{entry}{_states(facts, *states)}".removesuffix("; ")
    return Message(
        f"{what} the open-ledger grace" + (f" ({why})" if why else ""),
        _trust(facts).strip(),
        f"Then a worker {steps} it, and repairs its copies.{doubt}",
    )


def _open_fragment(ledger_id: int, facts: Facts) -> Message:
    if facts.is_in_recovery:
        doubt = f"; {end_doubt_text(facts)}" if facts.is_end_doubtful else ""
        return Message(
            f"its recovery was begun and not finished{doubt}",
            outlook="A worker finishes the recovery before it copies anything.",
        )
    advice = (
        "Its writer must close it. If the writer has stopped, run `bookmender ledger close "
        f"{ledger_id} --yes`; add `--force` if that is not certain."
    )
    if facts.draining:
        drain = _commands(facts.draining, "bookmender bookie drain {} --fence-open")
        advice += f" {drain} closes it, too."
    return Message(
        f"an open fragment cannot be copied{_where(facts, 'lacking', 'draining')}", advice
    )


def _no_copies(parts: Sequence[Facts]) -> Message:
    """Return one message for all parts of a ledger without a good copy: their entries and which
    bookies may have them, then once which bookies to start."""
    lacking = [facts for facts in parts if facts.withheld_count is None]
    told = list(dict.fromkeys(f"{_entries(facts)}, {_holders(facts)}" for facts in lacking))
    whats = []
    if len(told) == 1:
        whats.append(f"no bookie that answers has a good copy of {told[0]}")
    elif told:
        listed = "; ".join(f"({number}) {text}" for number, text in enumerate(told, start=1))
        whats.append(f"no bookie that answers has a good copy of {listed}")
    if withheld := [count for facts in parts if (count := facts.withheld_count) is not None]:
        how_many = f"{sum(withheld):,}" if all(withheld) else "an unknown number of"
        whats.append(
            f"{how_many} copies of other entries wait for these entries"
            if told
            else f"{how_many} copies wait, because other entries of the same fragments have no "
            "good copy"
        )
    absent = [bookie for facts in parts for bookie in facts.absent]
    return Message("; ".join(whats), f"Start {_names(absent)}." if absent else "")


def _holders(facts: Facts) -> str:
    """Return which bookies may have a good copy of entries that no other bookie has."""
    absent = [bookie for bookie in facts.absent if bookie not in facts.in_maintenance]
    holders = [
        f"{_names(bookies)} ({state})"
        for bookies, state in (
            (absent, "absent"),
            (facts.in_maintenance, "in maintenance"),
            (facts.decommissioned, "decommissioned"),
        )
        if bookies
    ]
    unasked = " (bookies of other fragments were not asked)" if facts.are_others_unasked else ""
    if not holders:
        return f"and no absent bookie should have one{unasked}"
    return f"but {' or '.join(holders)} may have one{unasked}"


def _no_target(facts: Facts) -> Message:
    why = _exclusions(facts)
    if facts.ack_quorum is not None:
        missing = (*facts.absent, *facts.decommissioned, *facts.superseded, *facts.unresponsive)
        start = f"Start {_names(missing)}, or add" if missing else "Add"
        return Message(
            f"recovery must store the last entries on {facts.ack_quorum} bookies (the ack quorum), "
            f"and no bookie may join: {why}",
            f"{start} a bookie.",
        )
    options = []
    if facts.in_maintenance:
        end = _commands(facts.in_maintenance, "bookmender bookie maintenance {} --end")
        stopped = set(facts.in_maintenance).intersection(facts.absent)
        start = f" and start {_names(sorted(stopped))}" if stopped else ""
        options.append(f"end the maintenance of {_names(facts.in_maintenance)} ({end}){start}")
    if facts.replaced is not None and facts.replaced in facts.absent:
        options.append(f"start {facts.replaced}")
    options.append("add a bookie")
    if facts.draining:
        cancel = _commands(facts.draining, "bookmender bookie drain {} --cancel")
        options.append(f"keep {_names(facts.draining)} ({cancel})")
    return Message(
        f"no bookie may receive the copy of {facts.replaced or 'a bookie'}: {why}",
        _sentence(options),
    )


def _exclusions(facts: Facts) -> str:
    errors = "; ".join(facts.errors)
    if facts.excluded is None:
        return "the placement policy allows none" + (f": {errors}" if errors else "")
    if not facts.excluded:
        return "no bookie is writable"
    counts = ", ".join(f"{count} {_EXCLUSIONS[exclusion]}" for exclusion, count in facts.excluded)
    total = sum(count for _, count in facts.excluded)
    writable = "1 writable bookie is" if total == 1 else f"{total} writable bookies are"
    return f"{writable} excluded: {counts}" + (f" ({errors})" if errors else "")


_EXCLUSIONS = {
    Exclusion.MEMBER: "already in the ensemble",
    Exclusion.REFUSED: "refused the ledger",
    Exclusion.SHORT_OF_SPACE: "short of disk space",
    Exclusion.DRAINING: "draining",
    Exclusion.MAINTENANCE: "in maintenance",
    Exclusion.QUARANTINED: "unresponsive",
    Exclusion.ISOLATED: "outside the isolation groups",
    Exclusion.NOT_LOCAL: "not local (replication.target is local)",
}


def _no_answer(facts: Facts) -> Message:
    told = [*facts.errors]
    if facts.entry_ids:
        told.insert(0, f"no bookie answered for {_entries(facts)}")
    if facts.unresponsive:
        told.insert(0, f"no answer from {_names(facts.unresponsive)}")
    return Message(": ".join(told) or "a bookie did not answer")


def _end_damaged(ledger_id: int, facts: Facts) -> Message:
    close = f"bookmender ledger close {ledger_id} --accept-loss --force"
    return Message(
        _with_untrusted(facts, otherwise="an entry at its end has damaged copies only"),
        f"If no bookie will ever return a good copy, `{close}` shows which entries would be given "
        f"up. With `--yes` it closes the ledger before these entries.{_trust(facts)}",
    )


CANNOT_CLOSE = (
    "If its writer runs, the writer can close it. No other client can, not even Java's: start the "
    "bookies that it misses, or delete it if its entries are not needed."
)
"""Advice for an open ledger with an ack quorum below 1."""


def _end_unproven(ledger_id: int, facts: Facts) -> Message:
    if facts.ack_quorum is not None and facts.ack_quorum < 1:
        what = (
            "; ".join(facts.errors)
            or f"its end cannot be proven: its ack quorum is {facts.ack_quorum}"
        )
        return Message(what, CANNOT_CLOSE)
    close = f"`bookmender ledger close {ledger_id} --accept-loss --yes`"
    if facts.needed:
        advice = (
            f"Start enough of {_names(facts.needed)}, even without their data: the ledger cannot "
            f"be closed before. If its end still cannot be proven then, run {close}."
        )
    elif facts.unresponsive:
        advice = (
            f"Start {_names(facts.unresponsive)}. If they never return, {close} closes the ledger "
            "after the last entry that is left."
        )
    else:
        advice = f"{close} closes the ledger after the last entry that is left."
    what = _with_untrusted(facts, otherwise="its end cannot be proven")
    return Message(what, advice + _trust(facts))


def _with_untrusted(facts: Facts, *, otherwise: str) -> str:
    """Return the errors and the reformatted bookies. ``otherwise``: the text without errors."""
    return ("; ".join(facts.errors) or otherwise) + _where(facts, "reformatted")


def _write_refused(facts: Facts) -> Message:
    if facts.metadata_bytes is None or facts.request_bytes_max is None:
        return Message("; ".join(facts.errors) or "ZooKeeper refuses its new metadata")
    return Message(
        f"its metadata of {facts.metadata_bytes:,} bytes is too large to be written again: "
        f"zookeeper.request_bytes_max is {facts.request_bytes_max:,}",
        "Raise it on all nodes if jute.maxbuffer of the servers allows more.",
    )


def _left_to_others(facts: Facts) -> Message:
    if facts.local is not None:
        return Message(
            f"this node may copy to its bookie {facts.local} only (replication.target is local), "
            "and that bookie cannot receive the copy"
        )
    if facts.lacking:
        return Message(f"the next try reads all copies on {_names(facts.lacking)}")
    return Message("the next try is due on any node")


# --- Parts of sentences ---------------------------------------------------------------------------

_STATES = {
    "absent": "not registered",
    "decommissioned": "decommissioned",
    "unresponsive": "not answering",
    "superseded": "another bookie is registered at the address",
    "reformatted": "reformatted after the ledger was created",
    "lacking": "lacking entries",
    "draining": "draining",
    "in_maintenance": "in maintenance",
}


def _states(facts: Facts, *states: str) -> str:
    """Return bookies by state, for example ``not registered: b1, b2; draining: b3``."""
    return "; ".join(
        f"{_STATES[state]}: {_names(bookies)}"
        for state in states
        if (bookies := getattr(facts, state))
    )


def _where(facts: Facts, *states: str) -> str:
    """Return the states in brackets; empty if no bookie is in one of them."""
    text = _states(facts, *states)
    return f" ({text})" if text else ""


def _names(bookies: Iterable[BookieId]) -> str:
    return shortened(list(dict.fromkeys(bookies)), at_most=BOOKIES_SHOWN_MAX)


def _commands(bookies: Sequence[BookieId], command: str) -> str:
    """Return the command for the bookie, or, if there are several, for ``ID``."""
    return f"`{command.format(bookies[0] if len(bookies) == 1 else 'ID')}`"


def _entries(facts: Facts) -> str:
    """Return ``entry 4``, ``entries 4, 7`` or ``more than 1,000 entries (4, 7, …)``."""
    listed = ", ".join(map(str, facts.entry_ids))
    if not listed:
        return f"{facts.entry_count:,} entries" if facts.entry_count else "some entries"
    if not facts.has_more_entries and facts.entry_count <= len(facts.entry_ids):
        return f"entry {listed}" if len(facts.entry_ids) == 1 else f"entries {listed}"
    more = "more than " if facts.has_more_entries else ""
    return f"{more}{facts.entry_count:,} entries ({listed}, …)"


def _sentence(options: Sequence[str]) -> str:
    text = ", or ".join(options)
    return f"{text[0].upper()}{text[1:]}."


def _trust(facts: Facts) -> str:
    if not facts.are_all_reformatted:
        return ""
    return (
        " The cookies of all bookies are newer than the ledger. If ZooKeeper was imported, or "
        "bookie ids changed, and no disk was erased, run `bookmender bookie trust-identities`."
    )


# --- Related texts --------------------------------------------------------------------------------


def end_doubt_text(facts: Facts) -> str:
    """Return why the end of an open ledger may not be provable."""
    where = _where(facts, "absent", "decommissioned", "superseded", "reformatted")
    trust = _trust(facts)
    return f"its end may not be provable{where}" + (f".{trust}" if trust else "")


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
