"""``bookmender plan``: shows what repairs would copy and what blocks them, or, with ``--all``, what
a leader would mark."""

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.observer import BookieCondition
from daemon.admin_session import AdminSession
from daemon.cli.main import EXIT_FAILED, EXIT_UNKNOWN, LedgerId, json_option
from daemon.cli.option_types import BookieArgument
from daemon.cli.output import echo_list, list_options
from daemon.cli.progress import LINE_INTERVAL_S, Line
from daemon.cli.session import log_errors_only, run_in_session, settings_for_command
from daemon.operations.observe import PLANNED_MAX, Outlook, open_observing
from daemon.operations.plan import LedgerPlan, PlannedCopy, RepairPlan
from daemon.operations.plan import plan as plan_repairs
from daemon.threads import own_cause
from daemon.words import counted, duration_text, printable, shortened
from ledgers.model import BookieId
from ledgers.sizes import size_text

LIMIT_ADVICE = "bookmender plan --limit N"
SHOWN_MAX = 20
"""Ledgers or bookies of a kind that are named; the others are counted."""


@click.command()
@click.argument("ledger_ids", metavar="[LEDGER]...", type=LedgerId(), nargs=-1)
@click.option("--bookie", type=BookieArgument(), help="Plan a drain of this bookie.")
@click.option("--all", "is_of_all", is_flag=True, help="Also what a leader would mark now.")
@click.option(
    "--limit",
    type=click.IntRange(min=0, max=10_000),
    default=PLANNED_MAX,
    show_default=True,
    help="Maximum number of ledgers.",
)
@list_options
@json_option
def plan(
    ledger_ids: tuple[int, ...],
    bookie: BookieId | None,
    is_of_all: bool,
    limit: int,
    config: Path | None,
    output: str,
) -> None:
    """Show what repairs would copy. Change nothing.

    \b
      bookmender plan                       the most urgent marked ledgers
      bookmender plan 17 4711               these ledgers, marked or not
      bookmender plan --bookie host:3181    what a drain of this bookie would copy
      bookmender plan --all                 what bookmender would mark and copy

    For each ledger it shows the entries, from where to where they would be copied, and what blocks
    the repair. It takes no lock and fences nothing. --all reads all metadata in a session that
    cannot write, decides as a leader would, and compares with the marks, so it may run beside
    Java's AutoRecovery. An absence that no bookmender leader recorded counts from now.

    Exit codes: 0 nothing to do. 1 copies are missing, an end cannot be proven, or a named ledger
    does not exist. 2 unknown bookie. 3 unknown, for example because metadata is unreadable.
    """
    if bool(ledger_ids) + (bookie is not None) + is_of_all > 1:
        raise click.UsageError("Give only one of: ledgers, --bookie, --all.")
    if is_of_all:
        _plan_all(config, output, limit)

    async def look(cluster: AdminSession) -> RepairPlan:
        return await plan_repairs(cluster, ledger_ids, bookie, limit=limit)

    found = run_in_session(config, look)
    _echo(output, found)
    sys.exit(_exit_code(found, are_named=bool(ledger_ids)))


def _echo(output: str, found: RepairPlan) -> None:
    echo_list(output, found, rows="ledgers", text=lambda: to_text(found))


def _exit_code(found: RepairPlan, *, are_named: bool) -> int:
    """Return the exit code.

    A deleted ledger is a failure if it was requested by ID; otherwise it was deleted just now.
    """
    if found.unreadable_ledgers:
        return EXIT_UNKNOWN
    is_left = any(are_named if each.is_gone else not each.is_whole for each in found.ledgers)
    return EXIT_FAILED if is_left or found.unproven_ends.count else 0


# --- Repairs --------------------------------------------------------------------------------------


def to_text(found: RepairPlan) -> str:
    planned = {each.ledger_id for each in found.ledgers}
    ends = found.unproven_ends
    lines = [
        line for each in found.ledgers for line in _lines(each, each.ledger_id in ends.ledgers)
    ]
    if found.unreadable_ledgers:
        count = counted(len(found.unreadable_ledgers), "ledger")
        lines.append(
            f"{count} with unreadable metadata may be on this bookie, too: "
            f"{_ids(found.unreadable_ledgers)}. bookmender ledger show ID shows the error"
        )
    if others := [i for i in ends.ledgers if i not in planned]:
        count = counted(ends.count - len(ends.ledgers) + len(others), "other ledger")
        lines.append(
            f"the end of {count} cannot be proven: {_ids(others)}. Copies do not help: bookmender "
            "ledger show ID shows the reason and what helps"
        )
    if found.none_marked:
        lines.append(f"no ledger is marked; bookmender status reports: {found.none_marked}")
    if found.more_ledgers is None:
        more = f"; there are more ledgers ({LIMIT_ADVICE})"
    else:
        more = f"; {counted(found.more_ledgers, 'more ledger')} not shown ({LIMIT_ADVICE})"
    there_count = sum(not each.is_gone for each in found.ledgers)
    lines.append(
        f"{counted(there_count, 'ledger')}, {_to_copy(found.entries, found.bytes)}"
        + ("" if found.more_ledgers == 0 else more)
    )
    return "\n".join(lines)


def _lines(found: LedgerPlan, is_end_unproven: bool) -> list[str]:
    """Return the plan of a ledger as lines."""
    head = f"ledger {found.ledger_id}: "
    if found.is_gone:
        return [head + "there is no such ledger"]
    if found.is_whole:
        end = f"copy, but its end cannot be proven: see bookmender ledger show {found.ledger_id}"
        return [f"{head}nothing to {end if is_end_unproven else 'do'}"]
    what = _to_copy(found.entries, found.bytes) if found.copies else "nothing to copy now"
    return [
        head + what,
        *(f"  {_copy_text(copy)}" for copy in found.copies),
        *(f"  blocked: {each.reason.value}: {printable(each.detail)}" for each in found.blocked),
    ]


def _to_copy(entry_count: int, byte_count: int) -> str:
    return f"{counted(entry_count, 'entry')} to copy, about {size_text(byte_count)}"


def _copy_text(copy: PlannedCopy) -> str:
    first, last = copy.first_entry_id, copy.last_entry_id
    if last is not None and last < first:
        entries = "no entries"
    else:
        entries = f"entry {first}" if first == last else f"entries {first} to {last}"
    how = "in place" if copy.is_in_place else f"which replaces {copy.replaced}"
    what = counted(copy.entries, "entry")
    return f"{entries}, bookie index {copy.bookie_index}: {what} to {copy.target}, {how}"


def _ids(ledger_ids: Sequence[int], count: int = 0) -> str:
    """Return the first ledgers. ``count``: how many there are, if not all are listed."""
    more = ", …" if count > len(ledger_ids) <= SHOWN_MAX else ""
    return f"ledger {shortened(ledger_ids, at_most=SHOWN_MAX)}{more}"


# --- What a leader would mark ---------------------------------------------------------------------


def _plan_all(config: Path | None, output: str, limit: int) -> None:
    """Print what bookmender would mark and repair in the whole cluster, and exit."""
    settings = settings_for_command(config)
    log_errors_only(settings)

    async def look() -> Outlook:
        async with open_observing(settings) as observing:
            await built(observing.updater)
            return await observing.look(planned_max=limit)

    try:
        found = asyncio.run(look())
    except BaseExceptionGroup as group:
        if (cause := own_cause(group)) is None:
            raise
        raise cause from group
    if output == "ids":
        _echo(output, found.would_repair)
    else:
        echo_list(output, found, rows="marks", text=lambda: outlook_text(found))
    sys.exit(outlook_exit_code(found))


async def built(updater: LedgerMapUpdater) -> None:
    """Wait until every ledger is known that ACLs do not hide, and show the progress.

    Raises UnauthorizedError if an ACL denies access to the root: waiting may never end.
    """
    with Line(due_s=time.monotonic() + LINE_INTERVAL_S) as line:
        while not (updater.completed_count and updater.is_up_to_date):
            if updater.refusal is not None:
                raise updater.refusal
            seen = updater.change_count
            line.write(f"{len(updater.ledger_map):,} ledgers read", now_s=time.monotonic())
            await updater.wait_change(seen)


def outlook_exit_code(found: Outlook) -> int:
    """Return the exit code. What operators ordered is nothing to do."""
    marks, known = found.marks, found.ledger_map
    is_named = any(each.ledgers for each in found.bookies.affected)
    if found.underreplicated.ledgers or marks.shared or marks.private_damaged or is_named:
        return EXIT_FAILED
    return EXIT_UNKNOWN if known.unreadable or not known.is_complete else 0


def outlook_text(found: Outlook) -> str:
    """Return it as lines of text: what would be marked, then what would be copied."""
    bookies = f"{found.bookies.writable} writable, {found.bookies.read_only} read-only"
    delay = duration_text(found.recovery_delay_s)
    known, unreadable = found.ledger_map, ""
    if known.unreadable:
        ids = _ids(known.unreadable_ledgers, known.unreadable)
        unreadable = f", metadata of {known.unreadable} unreadable: {ids}"
    so_far = "" if known.is_complete else " so far"
    sections = [
        ("DISABLED", ["auto-recovery is disabled: nothing is marked"] if found.is_disabled else []),
        ("HOLD", _hold_lines(found)),
        ("affected", _affected_lines(found)),
        ("would mark", _would_mark_lines(found)),
        ("marks", _mark_lines(found)),
        ("bookies", [f"{bookies}; an absent bookie is lost after {delay}"]),
        ("ledgers", [f"{known.ledgers:,} known{so_far}{unreadable}"]),
    ]
    lines = [
        f"{'' if number else label:<12}{line}"
        for label, texts in sections
        for number, line in enumerate(texts)
    ]
    return "\n".join([*lines, to_text(found.would_repair)])


def _hold_lines(found: Outlook) -> list[str]:
    if found.hold is None:
        return []
    would = "a safety hold is in force" if found.hold.is_ordered else "a leader would begin a hold"
    return [f"{would}: {printable(found.hold.reason)}"]


def _affected_lines(found: Outlook) -> list[str]:
    lost = "lost" if found.hold is None else "lost when the safety hold ends"
    lines = []
    for each in found.bookies.affected[:SHOWN_MAX]:
        states = {
            BookieCondition.LOST: lost,
            BookieCondition.ABSENT: f"absent, lost in {duration_text(each.left_s)}",
            BookieCondition.REFORMATTED: "reformatted, may lack its earlier copies",
        }
        lines.append(f"{each.bookie}  {states[each.state]}, {counted(each.ledgers, 'ledger')}")
    more = len(found.bookies.affected) - SHOWN_MAX
    return [*lines, *([f"and {more} more"] if more > 0 else [])] or ["no bookie"]


def _would_mark_lines(found: Outlook) -> list[str]:
    lacking = found.underreplicated
    if not lacking.ledgers:
        return ["no ledger"]
    size = size_text(lacking.lost_bytes)
    total = f"{counted(lacking.ledgers, 'ledger')}, about {size} of copies lost"
    return [
        f"{total}; most urgent first" if found.would_mark else f"no ledger now; otherwise {total}",
        *(
            f"  {count:,} with {counted(left, 'copy')} left"
            for left, count in lacking.by_copies_left.items()
        ),
        f"  {_ids(lacking.first_ledgers, lacking.ledgers)}",
    ]


MARK_GROUPS = {
    "unmarked": "lack a mark that a leader would make",
    "partly_marked": "have a mark that names too few bookies",
    "surplus": "have a mark that a leader would not make",
    "private": "are in bookmender's private queue",
    "private_damaged": "of these have damage that Java does not see",
}


def _mark_lines(found: Outlook) -> list[str]:
    marks, lines = found.marks, []
    for name, what in MARK_GROUPS.items():
        if count := getattr(marks, name):
            lines.append(f"  {count:,} {what}: {_ids(getattr(marks, f'{name}_ledgers'), count)}")
    total = counted(marks.total, "ledger")
    return [f"{total} marked, {marks.agreed} as a bookmender leader would", *lines]
