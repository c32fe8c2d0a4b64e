"""Ledgers to try things on, as ``bookmender local write`` writes them, and what is said of them.

Whatever ends the writing, what was written by then stays: a ledger that was begun is left as by a
writer that died.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress

from daemon.demo.shapes import shapes_to_try
from daemon.demo.workload import Workload, Written, open_workload
from daemon.operating.progress import counted
from daemon.settings import Settings
from daemon.visit import visit
from ledgers.errors import (
    NotEnoughBookiesError,
    SessionLostError,
    UnavailableError,
)

LOOK_TIMEOUT_S = 3.0
"""How long whoever presses Ctrl-C waits for what is said of the ledgers that were begun."""
LEFT_SHOWN_MAX = 10
CLOSE_HINT = "`bookmender ledger close ID --force --yes` closes one where it ends"
NEED = "ledgers that survive the loss of a bookie need three writable ones"


def write_ledgers(
    uri: str, ledger_count: int, *, written: list[Written], open_count: int = 0
) -> None:
    """Write so many ledgers that survive the loss of a bookie, and close all but ``open_count``,
    the last ones.

    ``written``: gets each as it is begun, and so tells how far it came whatever ends it. Raises
    NotEnoughBookiesError, also with fewer than three writable bookies; UnavailableError.
    """

    async def write() -> None:
        settings, rng = Settings(metadata_service_uri=uri), random.Random()
        async with visit(settings) as seen, open_workload(seen, rng) as workload:
            workload.written = written
            bookie_count = len((await seen.registration.read()).writable)
            wanted = shapes_to_try(ledger_count, open_count=open_count, bookie_count=bookie_count)
            if not wanted:
                raise NotEnoughBookiesError(NEED)
            try:
                await workload.write(wanted)
            except BaseException:  # Ctrl-C, too
                await _look_again(workload)
                raise

    asyncio.run(write())


async def _look_again(workload: Workload) -> None:
    """What is not known any more when the bookies or ZooKeeper fail stays as it was last known."""
    with suppress(UnavailableError, SessionLostError, TimeoutError):
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            await workload.look_again()


def what_was_written(written: Sequence[Written], *, ledger_count: int) -> list[str]:
    """For people, in lines. ``ledger_count``: so many there were to be."""
    done = [each for each in written if each.is_done]
    entries = counted(sum(each.acknowledged for each in done), "entry")
    of = "" if len(done) == ledger_count else f"{len(done):,} of "
    lines = [f"wrote {of}{counted(ledger_count, 'ledger')}, {entries}"]
    if left := sorted(each.ledger_id for each in written if not each.is_closed):
        shown = ", ".join(map(str, left[:LEFT_SHOWN_MAX]))
        more = f" and {len(left) - LEFT_SHOWN_MAX:,} more" if len(left) > LEFT_SHOWN_MAX else ""
        lines.append(f"left open, as by a writer that died: ledger {shown}{more}")
    return lines


def so_far(written: Sequence[Written], *, ledger_count: int, ended: str) -> list[str]:
    """Likewise where it ended early, and how to go on. ``ended``: in a word."""
    if not written:
        return [f"{ended}; nothing was written"]
    first, *left = what_was_written(written, ledger_count=ledger_count)
    return [f"{ended}; {first}: they stay", *(f"{line}; {CLOSE_HINT}" for line in left)]
