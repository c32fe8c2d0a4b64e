"""Where each bookie was when its rack was last known: kept by the leader, for all nodes that start
later.

A source may know a bookie by its host or IP address alone, and those of one that is away are not
registered. A node that was running then remembers; one that starts meanwhile, or whose source is
broken, reads it here: or it would take the default rack for the bookie's, and the ledger's other
copies for well placed (G19).
"""

import json
from collections.abc import Mapping
from typing import Any

import structlog

from ledgers.clock import Clock
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.metadata import BookieId
from ledgers.placement.racks import Racks, clean_rack
from ledgers.store import MetadataStore
from replication.cluster.cluster_view import ViewSource
from replication.cluster.own_state import as_text, part, racks_path, read_record
from replication.cluster.racks import RETRY_S, RackKeeper
from replication.queue.batching import Batcher

log = structlog.get_logger()


async def remembered_racks(store: MetadataStore, ur: str) -> dict[BookieId, str]:
    """Nothing where nothing is stored, or nothing that this release can read, or may."""
    try:
        return await read_record(store, racks_path(ur), _racks) or {}
    except UnauthorizedError as error:
        log.warning("racks.shut_away", error=str(error))
        return {}


def _racks(record: Mapping[str, Any]) -> dict[BookieId, str]:
    told = {b: clean_rack(as_text(rack, "rack")) for b, rack in part(record, "racks").items()}
    return {BookieId(bookie): rack for bookie, rack in told.items() if rack is not None}


class RackMemory:
    """The leader's. Written through ``batcher``, whose guards prove the leadership (rule S9)."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        batcher: Batcher,
        ur: str,
        racks: Racks,
        keeper: RackKeeper,
        views: ViewSource,
        clock: Clock,
    ) -> None:
        self._store = store
        self._batcher = batcher
        self._ur = ur
        self._racks = racks
        self._keeper = keeper
        self._views = views
        self._clock = clock

    async def run(self) -> None:
        """Write at every change, until cancelled. Raises SessionLostError or
        LeadershipLostError."""
        while True:
            seen = self._keeper.change_count
            while not await self._try_write():
                await self._clock.sleep(RETRY_S)
            await self._keeper.wait_change(seen)

    async def _try_write(self) -> bool:
        try:
            await self.write()
        except (UnavailableError, UnauthorizedError) as error:
            log.warning("racks.not_remembered", error=str(error))
            return False
        return True

    async def write(self) -> None:
        """What is known now, if that is not what stands there. A decommissioned bookie is
        forgotten."""
        view = self._views.current
        there_are = view.available | view.cookies.keys()
        racks = {b: rack for b, rack in self._racks.known.items() if b in there_are}
        if racks != await remembered_racks(self._store, self._ur):
            record = {"version": 1, "racks": dict(sorted(racks.items()))}
            await self._batcher.put(racks_path(self._ur), json.dumps(record).encode())
