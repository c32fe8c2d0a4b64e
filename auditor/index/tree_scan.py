"""One walk over the ledgers of one tree: all are read, and those that have gone leave the index."""

from collections.abc import AsyncIterator, Sequence

from auditor.index.ledger_index import LedgerIndex
from auditor.index.reader import READS_AT_ONCE, IndexReader
from ledgers.errors import UnauthorizedError
from ledgers.manager import LedgerManager
from ledgers.store import MetadataStore
from ledgers.zookeeper.walk import OnStray


class TreeScan:
    """To be run once. ``tree``: one of ``LedgerManager.trees``."""

    def __init__(
        self,
        store: MetadataStore,
        manager: LedgerManager,
        reader: IndexReader,
        index: LedgerIndex,
        *,
        tree: str,
        on_stray: OnStray,
    ) -> None:
        self._store, self._manager, self._reader, self._index = store, manager, reader, index
        self._tree, self._on_stray = tree, on_stray
        self._unlisted: list[int] = []
        """Ledgers that the index knows, and the walk passed by."""

    async def run(self) -> AsyncIterator[tuple[int, Sequence[int]]]:
        """How many ledgers were read, and which the index did not know so; a part at a time.

        Raises UnavailableError when the walk cannot be completed, and at its end UnauthorizedError
        where ACLs shut some directory away: nothing has left the index then.
        """
        async for part in self._parts():
            yield len(part), await self._reader.read(part)
        # A ledger may have been made since its directory was listed (rule S8).
        await self._store.sync(self._tree)
        for start in range(0, len(self._unlisted), READS_AT_ONCE):
            yield 0, await self._reader.read(self._unlisted[start : start + READS_AT_ONCE])

    async def _parts(self) -> AsyncIterator[Sequence[int]]:
        """All that are listed. A directory may hold thousands of them, or a single one."""
        waiting: list[int] = []
        ids = self._manager.layout.ids_below(self._manager.root, self._tree)
        passed_id = ids.start
        refusal: UnauthorizedError | None = None
        try:
            async for listed in self._manager.ledger_ids_of(self._tree, on_stray=self._on_stray):
                self._note_unlisted(passed_id, listed[-1] + 1, listed)
                passed_id = listed[-1] + 1
                waiting += listed
                while len(waiting) >= READS_AT_ONCE:
                    yield waiting[:READS_AT_ONCE]
                    del waiting[:READS_AT_ONCE]
        except UnauthorizedError as error:
            refusal = error
        if waiting:
            yield waiting
        if refusal is not None:
            raise refusal
        self._note_unlisted(passed_id, ids.stop, ())

    def _note_unlisted(self, first: int, stop: int, listed: Sequence[int]) -> None:
        """``listed``: all that are in this range of ids. The walk goes through them in order."""
        known = self._index.ids_in(first, stop)
        if known:
            self._unlisted += sorted(set(known).difference(listed))
