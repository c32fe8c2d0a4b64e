"""A worker without copying: it writes the ledger's metadata, then deletes the mark."""

import asyncio
import random
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace

from ledgers.errors import ConflictError, NoNodeError, NoSuchLedgerError, NotEmptyError
from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId, LedgerMetadata, Segment
from replication.marks import marked_ledger_ids
from tests.znode_cluster import PATHS, ZnodeCluster


@dataclass(slots=True)
class SoakWorker:
    """Every call may raise UnavailableError."""

    cluster: ZnodeCluster
    rng: random.Random
    worked_off_count: int = 0

    async def work_off(self, count_max: int) -> None:
        """Complete that many random marks.

        A ledger that names absent bookies is moved to others.
        """
        ledger_ids = await marked_ledger_ids(self.cluster.store, PATHS)
        present = await self.cluster.registered()
        chosen = self.rng.sample(ledger_ids, min(count_max, len(ledger_ids)))
        await asyncio.gather(*(self._work_off(each, present, repairs=True) for each in chosen))

    async def delete_surplus(self) -> None:
        """Delete all marks of ledgers that miss nothing or were deleted."""
        present = await self.cluster.registered()
        ledger_ids = await marked_ledger_ids(self.cluster.store, PATHS)
        await asyncio.gather(*(self._work_off(each, present, repairs=False) for each in ledger_ids))

    async def _work_off(
        self, ledger_id: int, present: Collection[BookieId], *, repairs: bool
    ) -> None:
        """Delete the mark at the version that was read.

        A mark that grew meanwhile stays (rule S6).
        """
        path = PATHS.mark(ledger_id)
        try:
            _, stat = await self.cluster.store.get(path)
            found = await self._read(ledger_id)
            if found is not None and not found.metadata.bookies <= set(present):
                if not repairs:
                    return
                await self.cluster.manager.write(
                    ledger_id, self._moved(found.metadata, present), read_as=found
                )
            await self.cluster.store.delete(path, version=stat.version)
            with suppress(NotEmptyError):  # the ledger is marked again already
                await self.cluster.store.delete(path.rpartition("/")[0])
        except (ConflictError, NoNodeError, NoSuchLedgerError):
            return  # another writer was quicker: try next time
        self.worked_off_count += 1

    async def _read(self, ledger_id: int) -> VersionedMetadata | None:
        try:
            return await self.cluster.manager.read(ledger_id)
        except NoSuchLedgerError:
            return None

    def _moved(self, metadata: LedgerMetadata, present: Collection[BookieId]) -> LedgerMetadata:
        segments = tuple(self._segment(each, present) for each in metadata.segments)
        return replace(metadata, segments=segments)

    def _segment(self, segment: Segment, present: Collection[BookieId]) -> Segment:
        spare = sorted(set(present) - set(segment.ensemble))
        self.rng.shuffle(spare)
        lost = [index for index, named in enumerate(segment.ensemble) if named not in present]
        return segment.with_bookies({index: spare.pop() for index in lost})
