"""The ledgers that ``fsck run --changed`` checks: those that changed since the last run.

fsck is a client of the feed. Its receipts follow the results:

1. ``fetch_changes`` reads what the client was not told, or decides that the run checks all ledgers
   (``why_whole``). The run stores this with its plan.
2. The run checks the ledgers and stores its results. After a run over all ledgers, the folder's
   position is that of its begin.
3. ``acknowledge`` stores the position in the folder of the results, and then the receipts.

A run that dies before step 3 is continued, or the next run is given the same ledgers again. The
folder knows up to which checkpoint its results are complete. The receipts may be behind it, and
are raised then. If they are ahead, another folder uses the client, and the run checks all ledgers.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from auditor.fsck.options import FeedChanges, Level
from auditor.fsck.results.folder import ClientPosition, keep_position, read_positions
from checkpoints.chain import FeedChain
from checkpoints.client import ClusterConnection, FeedClient, open_client_in
from checkpoints.errors import PositionUnknownError
from checkpoints.model import CheckpointId, CommittedVersion, LogId, ledger_key
from daemon.words import counted, printable
from ledgers.errors import SettingsError

FEED_IS_OFF: Final = (
    "--changed needs the change feed, and the feed is not enabled. Enable it: bookmender feed "
    "enable. Or run fsck without --changed"
)


class WhyWhole(enum.Enum):
    """Why a run with ``--changed`` checks all ledgers. The last four also may happen during a run:
    then nothing is acknowledged, and the next run does."""

    FIRST = "it is the first one of client {client} in this folder"
    OTHER_LEVEL = "the last run of client {client} was at another level"
    NEW_FEED = "the change feed was disabled and enabled"
    OTHER_FOLDER = (
        "client {client} has receipts that this folder has no results of. If another folder uses "
        "this client, give each its own --client"
    )
    RETENTION = (
        "the feed has deleted changes that no run has checked. Run fsck more often, or keep more: "
        "bookmender feed enable --retention"
    )
    RESTORED = (
        "the change feed does not have the checkpoint up to which this folder has results, as "
        "after a restore of ZooKeeper from a backup"
    )

    def text(self, client: str) -> str:
        return self.value.format(client=printable(client))


def client_name(level: Level) -> str:
    """Return the client of runs at this level, unless the user names one."""
    return f"fsck-{level.value}"


def why_whole(
    known: ClientPosition | None,
    *,
    level: Level,
    chain: FeedChain,
    end: CheckpointId,
    stored: CheckpointId | None,
) -> WhyWhole | None:
    """Return why the run checks all ledgers; None if the changes since ``known`` suffice.

    ``known``: of the folder; None: it has none. ``chain``, ``end``: the present feed, and its last
    checkpoint. ``stored``: the low watermark of the client. None: it has no receipts, because a run
    died before it stored them, or an operator deleted them. The results in the folder count all the
    same.
    """
    if known is None:
        return WhyWhole.FIRST
    if known.level is not level:
        return WhyWhole.OTHER_LEVEL
    if known.generation != chain.generation:
        return WhyWhole.NEW_FEED
    if known.position > end or not chain.knows(known.log and LogId(*known.log)):
        return WhyWhole.RESTORED
    if stored is not None and stored > known.position:
        return WhyWhole.OTHER_FOLDER
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """``why``: why a new run checks all ledgers; None if it does not. ``changes``: None only for an
    unfinished run that does not follow the feed, and so cannot be continued with ``--changed``."""

    changes: FeedChanges | None
    why: WhyWhole | None

    def notes(self) -> list[str]:
        """Return what the run is going to check."""
        changes = self.changes
        if changes is None:
            return []
        if self.why is not None:
            return [
                f"this run checks all ledgers: {self.why.text(changes.client)}",
                f"later runs check what changes after checkpoint {changes.position:#x}",
            ]
        if changes.is_whole:
            return ["this continued run checks all ledgers"]
        deleted_count = sum(changes.are_deleted)
        deleted = f", {deleted_count:,} of them deleted" if deleted_count else ""
        count = counted(len(changes.ledger_ids), "changed ledger")
        return [f"client {printable(changes.client)}: {count}{deleted}"]


class _Ignoring:
    """A listener for changes after ``subscribe``: the next run is given them."""

    async def receive(self, committed: CommittedVersion) -> None:
        pass


def _refuse() -> None:
    raise SettingsError(FEED_IS_OFF)


async def fetch_changes(
    cluster: ClusterConnection, *, client: str, level: Level, state: Path, **parts: Any
) -> Fetched:
    """Return what a new run checks. ``state``: the folder of the positions. ``parts``: for
    ``open_client_in``. Raises SettingsError if the feed is disabled; UnavailableError."""
    known = read_positions(state).get(client)
    async with open_client_in(cluster, name=client, on_disabled=_refuse, **parts) as opened:
        end = await opened.log.wait_started()
        chain = opened.log.chain
        stored = await opened.store.get_low_watermark()
        why = why_whole(known, level=level, chain=chain, end=end, stored=stored)
        whole = FeedChanges(
            client=client,
            generation=chain.generation,
            position=end,
            is_whole=True,
            log=chain.log_of(end),
        )
        if why is not None:
            return Fetched(changes=whole, why=why)
        assert known is not None
        if stored is None or stored < known.position:
            await opened.store_low_watermark(known.position)
        try:
            missed = await opened.service.subscribe(_Ignoring())
        except PositionUnknownError:
            return Fetched(changes=whole, why=WhyWhole.RESTORED)
        if missed.lifted is not None:
            return Fetched(changes=whole, why=WhyWhole.RETENTION)
        ledger_ids, versions, are_deleted = array("q"), array("Q"), bytearray()
        for committed in missed:
            if (ledger_id := committed.ledger_id) is not None:
                ledger_ids.append(ledger_id)
                versions.append(committed.version)
                are_deleted.append(committed.is_deleted)
    # The watermark may have passed changes that later ones replace. It is known once all is closed.
    known = _at_watermark(known, opened)
    keep_position(state, client, known)
    changes = replace(
        whole,
        is_whole=False,
        position=known.position,
        log=known.log,
        ledger_ids=ledger_ids,
        versions=versions,
        are_deleted=bytes(are_deleted),
    )
    return Fetched(changes=changes, why=None)


def _at_watermark(position: ClientPosition, client: FeedClient) -> ClientPosition:
    low_watermark = client.service.low_watermark
    assert low_watermark is not None
    return replace(position, position=low_watermark, log=client.log.log_of(low_watermark))


async def acknowledge(
    cluster: ClusterConnection,
    changes: FeedChanges,
    *,
    level: Level,
    state: Path,
    unanswered: Container[int],
    **parts: Any,
) -> WhyWhole | None:
    """Store the position in the folder, and the receipts of what was checked. After a run over all
    ledgers the folder has the position already. Return None, or why nothing was stored and the next
    run checks all ledgers.

    ``unanswered``: ledgers that could not be checked. They get no receipt, so the next run is given
    them again. Raises UnavailableError, and SettingsError if the feed is disabled: then the next
    run is given all of it again, except after a run that checked all ledgers.
    """
    position = ClientPosition.after(changes, level)
    async with open_client_in(cluster, name=changes.client, on_disabled=_refuse, **parts) as opened:
        await opened.log.wait_started()
        chain = opened.log.chain
        if chain.generation != changes.generation:
            return WhyWhole.NEW_FEED
        if not chain.knows(changes.log and LogId(*changes.log)):
            return WhyWhole.RESTORED
        stored = await opened.store.get_low_watermark()
        if stored is not None and stored > changes.position:
            return WhyWhole.OTHER_FOLDER
        if changes.is_whole:
            await opened.store_low_watermark(changes.position)
            return None
        service = opened.service
        try:
            missed = await service.subscribe(_Ignoring())
        except PositionUnknownError:
            return WhyWhole.RESTORED
        if missed.lifted is not None:
            return WhyWhole.RETENTION
        for committed in missed:
            if committed.ledger_id is None:  # other kinds of objects are no concern of fsck
                service.submit_receipt(committed.key, committed.version)
        for ledger_id, version in zip(changes.ledger_ids, changes.versions, strict=True):
            if ledger_id not in unanswered:
                service.submit_receipt(ledger_key(ledger_id), version)
        # Before the receipts are written, which begins with the next await: else a crash between
        # the two would look as if another folder used this client.
        keep_position(state, changes.client, _at_watermark(position, opened))
    # Later changes may have replaced some.
    keep_position(state, changes.client, _at_watermark(position, opened))
    return None
