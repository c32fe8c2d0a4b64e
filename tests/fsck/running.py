"""A whole run without Spark: all ledgers are checked, and those that seem wrong are rechecked."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from auditor.fsck.executor import inspect, recheck
from auditor.fsck.options import FsckOptions, Level
from auditor.fsck.verdicts import LedgerVerdict
from tests.fsck.kinds import SAMPLE_SHARE, SEED, Told


def options(uri: str, level: Level, **changes: Any) -> FsckOptions:
    fields = {"sample_share": SAMPLE_SHARE, "seed": SEED} | changes
    return FsckOptions(metadata_service_uri=uri, level=level, **fields)


async def _nothing() -> None: ...


async def run(
    wanted: FsckOptions,
    ledger_ids: Iterable[int],
    *,
    on_first: Callable[[], Awaitable[None]] = _nothing,
) -> dict[int, LedgerVerdict]:
    """Return the verdicts of a run; deleted ledgers have none.

    ``on_first`` is called when the first verdict is there.
    """
    found: dict[int, LedgerVerdict] = {}

    async def add(verdict: LedgerVerdict) -> None:
        assert verdict.ledger_id not in found, verdict
        found[verdict.ledger_id] = verdict
        if len(found) == 1:
            await on_first()

    await inspect(wanted, ledger_ids, add)
    doubtful = [verdict for verdict in found.values() if verdict.needs_recheck]
    sure = {i: verdict for i, verdict in found.items() if not verdict.needs_recheck}

    async def confirm(verdict: LedgerVerdict) -> None:
        sure[verdict.ledger_id] = verdict

    if doubtful:
        await recheck(wanted, doubtful, confirm)
    return sure


def told(verdict: LedgerVerdict) -> Told:
    return Told(
        grade=verdict.grade, findings=verdict.findings, rests_on_unknown=verdict.rests_on_unknown
    )
