"""Writes the ledgers of ``bookmender local write``.

If the writing stops early, the ledgers written so far remain. A ledger that was begun is left as
if its writer had died.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress

from daemon.admin_session import admin_session
from daemon.demo.workload import Workload, Written, open_workload, shapes_to_try
from daemon.settings import Settings
from daemon.words import counted
from ledgers.errors import NotEnoughBookiesError, SessionLostError, UnavailableError

LOOK_TIMEOUT_S = 3.0
"""After Ctrl-C, maximum time for looking up the state of the ledgers that were begun."""
LEFT_SHOWN_MAX = 10
CLOSE_HINT = "`bookmender ledger close ID --force --yes` closes one at its end"
NEED = "ledgers that survive the loss of a bookie need three writable ones"


def write_ledgers(
    settings: Settings, ledger_count: int, *, written: list[Written], open_count: int = 0
) -> None:
    """Write ledgers that survive the loss of a bookie, and close all except the last
    ``open_count``.

    ``written``: receives each ledger when it is begun, so it is valid after any error. Raises
    NotEnoughBookiesError, also for fewer than three writable bookies; UnavailableError.
    """

    async def write() -> None:
        rng = random.Random()
        async with admin_session(settings) as seen, open_workload(seen, rng) as workload:
            workload.written = written
            bookie_count = len((await seen.registration.read()).writable)
            wanted = shapes_to_try(ledger_count, open_count=open_count, bookie_count=bookie_count)
            if not wanted:
                raise NotEnoughBookiesError(NEED)
            try:
                await workload.write(wanted)
            except BaseException:  # also Ctrl-C
                await _look_again(workload)
                raise

    asyncio.run(write())


async def _look_again(workload: Workload) -> None:
    """Update the state of the ledgers that were begun. What cannot be read stays as it was last
    known."""
    with suppress(UnavailableError, SessionLostError, TimeoutError):
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            await workload.look_again()


def what_was_written(written: Sequence[Written], *, ledger_count: int) -> list[str]:
    """Return lines of text about the ledgers that were written. ``ledger_count``: the number
    requested."""
    done = [each for each in written if each.is_done]
    entries = counted(sum(each.acknowledged for each in done), "entry")
    of = "" if len(done) == ledger_count else f"{len(done):,} of "
    lines = [f"wrote {of}{counted(ledger_count, 'ledger')}, {entries}"]
    if left := sorted(each.ledger_id for each in written if not each.is_closed):
        shown = ", ".join(map(str, left[:LEFT_SHOWN_MAX]))
        more = f" and {len(left) - LEFT_SHOWN_MAX:,} more" if len(left) > LEFT_SHOWN_MAX else ""
        lines.append(f"left open without a writer: ledger {shown}{more}")
    return lines


def so_far(written: Sequence[Written], *, ledger_count: int, ended: str) -> list[str]:
    """Return the same after an early end, and how to go on. ``ended``: one word."""
    if not written:
        return [f"{ended}; nothing was written"]
    first, *left = what_was_written(written, ledger_count=ledger_count)
    return [f"{ended}; {first}: they stay", *(f"{line}; {CLOSE_HINT}" for line in left)]
