"""``bookmender plan``: shows what a repair would copy, and what blocks it, without changing
anything."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from daemon.admin_session import AdminSession, run_in_session
from daemon.cli.bookies import BookieArgument
from daemon.cli.main import (
    EXIT_FAILED,
    EXIT_UNKNOWN,
    LedgerId,
    config_option,
    json_option,
)
from daemon.cli.output import echo_list, list_output_option
from daemon.messages import blocked_record, message
from daemon.previews import Previews, plan_for
from daemon.words import counted, printable, shortened
from ledgers.model import BookieId
from ledgers.sizes import size_text
from replication.by_hand import Preview
from replication.ledger_record import UnprovenEnd
from replication.plan import Repair
from replication.reasons import Blocked

LIMIT_DEFAULT = 20
LIMIT_ADVICE = "bookmender plan --limit N"
"""The command is named because drain and repair, which show plans too, have no --limit."""
UNREADABLE_SHOWN_MAX = 20
COLUMNS = (
    "ledger_id",
    "is_whole",
    "entries",
    "bytes",
    "copies.from",
    "copies.to",
    "blocked.reason",
)
UNPROVEN_SHOWN_MAX = 1_000


@click.command()
@click.argument("ledger_ids", metavar="[LEDGER]...", type=LedgerId(), nargs=-1)
@click.option("--bookie", type=BookieArgument(), help="Plan a drain of this bookie.")
@click.option(
    "--limit",
    type=click.IntRange(min=1, max=10_000),
    default=LIMIT_DEFAULT,
    show_default=True,
    help="Maximum number of ledgers.",
)
@config_option
@list_output_option
@json_option
def plan(
    ledger_ids: tuple[int, ...],
    bookie: BookieId | None,
    limit: int,
    config: Path | None,
    output: str,
) -> None:
    """Show what would be copied from where to where, and what blocks it. Changes nothing.

    \b
      bookmender plan                       the most urgent marked ledgers
      bookmender plan 17 4711               these ledgers, marked or not
      bookmender plan --bookie host:3181    what a drain of this bookie would copy

    The command reads metadata and asks bookies, but takes no lock and fences nothing. A node may
    choose another of several equally good targets. Whether each entry still has a good copy is
    known only after trying. Ledgers whose end cannot be proven are listed
    too, because they need an operator.

    Exit codes: 0 nothing to do. 1 copies are missing, an end cannot be proven, or a named ledger
    does not exist. 2 unknown bookie. 3 unknown, for example because metadata is unreadable.
    """
    if ledger_ids and bookie is not None:
        raise click.UsageError("Name ledgers or give --bookie, not both.")

    async def look(cluster: AdminSession) -> Previews:
        return await plan_for(cluster, ledger_ids, bookie, limit=limit)

    found = run_in_session(config, look)
    echo_list(output, to_json(found), rows="ledgers", columns=COLUMNS, text=lambda: to_text(found))
    sys.exit(_exit_code(found, are_named=bool(ledger_ids)))


def _exit_code(found: Previews, *, are_named: bool) -> int:
    """Return the exit code.

    A deleted ledger is a failure if it was requested by ID; otherwise it was deleted just now.
    """
    if found.unreadable:
        return EXIT_UNKNOWN
    is_missing = are_named and any(each.is_gone for each in found.ledgers)
    is_whole = all(each.plan.is_whole for each in found.ledgers)
    is_proven = not found.unproven and not found.unproven_others
    return 0 if is_whole and is_proven and not is_missing else EXIT_FAILED


def to_json(found: Previews) -> dict[str, Any]:
    return {
        "ledgers": [_record(each) for each in found.ledgers],
        "entries": sum(each.entry_count for each in found.ledgers),
        "bytes": sum(each.byte_count for each in found.ledgers),
        "more_ledgers": found.more,
        "unreadable_ledgers": list(found.unreadable),
        "none_marked": found.none_marked or None,
        "unproven_ends": {
            "count": len(found.unproven) + len(found.unproven_others),
            "ledgers": sorted([*(end.ledger_id for end in found.unproven), *found.unproven_others])[
                :UNPROVEN_SHOWN_MAX
            ],
        },
    }


def _record(found: Preview) -> dict[str, Any]:
    return {
        "ledger_id": found.ledger_id,
        "is_gone": found.is_gone,
        "is_whole": found.plan.is_whole and not found.is_gone,
        "entries": found.entry_count,
        "bytes": found.byte_count,
        "copies": [_copy_record(repair) for repair in found.repairs],
        "blocked": [_blocked_record(found.ledger_id, each) for each in found.plan.blocked],
    }


def _copy_record(repair: Repair) -> dict[str, Any]:
    return {
        "first_entry_id": repair.fragment.first_entry_id,
        "last_entry_id": repair.fragment.last_entry_id,
        "bookie_index": repair.index,
        "from": repair.replaced,
        "to": repair.target,
        "is_in_place": repair.is_in_place,
        "entries": len(repair.entry_ids),
        "bytes": repair.byte_count,
    }


def _blocked_record(ledger_id: int, blocked: Blocked) -> dict[str, Any]:
    return {**blocked_record(ledger_id, blocked), "until_ms": blocked.until_ms}


def to_text(found: Previews) -> str:
    ends = {end.ledger_id: end for end in found.unproven}
    lines = [line for each in found.ledgers for line in _lines(each, ends.get(each.ledger_id))]
    if found.unreadable:
        lines.append(_unreadable_text(found.unreadable))
    if found.unproven_others:
        lines.append(_unproven_text(found.unproven_others))
    if found.none_marked:
        lines.append(f"no ledger is marked; bookmender status reports: {found.none_marked}")
    there_count = sum(not each.is_gone for each in found.ledgers)
    entry_count = sum(each.entry_count for each in found.ledgers)
    byte_count = sum(each.byte_count for each in found.ledgers)
    lines.append(
        f"{counted(there_count, 'ledger')}, {_to_copy(entry_count, byte_count)}" + _more(found.more)
    )
    return "\n".join(lines)


def _unreadable_text(ledger_ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ledger_ids[:UNREADABLE_SHOWN_MAX]))
    more = " and more" if len(ledger_ids) > UNREADABLE_SHOWN_MAX else ""
    return (
        f"{counted(len(ledger_ids), 'ledger')} with unreadable metadata may be on this bookie, "
        f"too: {shown}{more}. bookmender ledger show ID shows the error"
    )


def _unproven_text(ledger_ids: Sequence[int]) -> str:
    shown = shortened(ledger_ids, at_most=UNREADABLE_SHOWN_MAX)
    ends = (
        "the end of 1 other ledger"
        if len(ledger_ids) == 1
        else f"the ends of {len(ledger_ids):,} other ledgers"
    )
    return (
        f"{ends} cannot be proven (ledger {shown}). Copies do not help: bookmender ledger "
        "show ID shows the reason and what helps"
    )


def _more(more: int | None) -> str:
    if more is None:
        return f"; there are more ledgers ({LIMIT_ADVICE})"
    return f"; {counted(more, 'more ledger')} not shown ({LIMIT_ADVICE})" if more else ""


def _lines(found: Preview, end: UnprovenEnd | None) -> list[str]:
    """Return the plan of a ledger as lines.

    ``end``: why the ledger's end could not be proven at the last try, if so.
    """
    head = f"ledger {found.ledger_id}: "
    if found.is_gone:
        return [head + "there is no such ledger"]
    if found.plan.is_whole and end is not None:
        why = printable(message(end.ledger_id, end.blocked).text)
        return [head + f"nothing to copy, but its end cannot be proven: {why}"]
    if found.plan.is_whole:
        return [head + "nothing to do"]
    if found.repairs:
        head += _to_copy(found.entry_count, found.byte_count)
    else:
        head += "nothing to copy now"
    return [
        head,
        *(f"  {_copy_text(repair)}" for repair in found.repairs),
        *(line for each in found.plan.blocked for line in _blocked_lines(found.ledger_id, each)),
    ]


def _to_copy(entry_count: int, byte_count: int) -> str:
    return f"{counted(entry_count, 'entry')} to copy, about {size_text(byte_count)}"


def _blocked_lines(ledger_id: int, blocked: Blocked) -> list[str]:
    told = message(ledger_id, blocked)
    lines = [f"  blocked: {blocked.reason.value}: {told.what}"]
    if told.outlook:  # nothing to do
        lines.append(f"    next: {told.outlook}")
    if told.advice:
        lines.append(f"    to do: {told.advice}")
    return list(map(printable, lines))


def _copy_text(repair: Repair) -> str:
    fragment = repair.fragment
    first, last = fragment.first_entry_id, fragment.last_entry_id
    if last is not None and last < first:
        entries = "no entries"
    else:
        entries = f"entry {first}" if first == last else f"entries {first} to {last}"
    where = f"{entries}, bookie index {repair.index}"
    what = counted(len(repair.entry_ids), "entry")
    if repair.is_in_place:
        return f"{where}: {what} to {repair.target}, in place"
    return f"{where}: {what} to {repair.target}, which replaces {repair.replaced}"
