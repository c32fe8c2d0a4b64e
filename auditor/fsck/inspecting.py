"""What an executor runs: ledgers looked at, each by itself, and a verdict for each. Writes and fences nothing.

A second look (``recheck``) at what seemed wrong comes later in the run, at fresh metadata: only then is it told.
"""

from collections.abc import AsyncIterator, Iterable

from auditor.fsck.levels import FsckOptions
from auditor.fsck.pace import BeginPace, FixedPace
from auditor.fsck.verdicts import LedgerVerdict


async def inspect(
    options: FsckOptions, ledger_ids: Iterable[int], *, begin_pace: BeginPace = FixedPace
) -> AsyncIterator[LedgerVerdict]:
    """A verdict for each ledger that there is, as they are done; a ledger that is gone yields none.

    In one session of its own, with one connection of a kind to each bookie. Raises SessionLostError,
    UnavailableError (ZooKeeper does not answer), SettingsError (no such cluster): then nothing is known of the
    ledgers that are yet to come.
    """
    raise NotImplementedError
    yield


async def recheck(
    options: FsckOptions, verdicts: Iterable[LedgerVerdict], *, begin_pace: BeginPace = FixedPace
) -> AsyncIterator[LedgerVerdict]:
    """What is to be said instead of verdicts that ``seems_wrong``; as ``inspect``.

    Of open ledgers only what was acknowledged at the first look is expected; they are idle if nothing has
    been written since.
    """
    raise NotImplementedError
    yield
