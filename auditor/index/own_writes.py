"""Metadata that this node's worker wrote: the index needs not read it again.

A worker has a thread and a session of its own, so that its reply and the index's event come in any
order. Which write an event tells of its zxid says: what was written then is as good as what a read
would give.
"""

import threading

from ledgers.manager import VersionedMetadata

KEPT_MAX = 1_000
"""Ledgers: those that were not asked for meanwhile are read, as where another node keeps the
index."""


class OwnWrites:
    """For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, VersionedMetadata] = {}

    def keep(self, written: VersionedMetadata) -> None:
        """``written``: with the znode's stat of that write."""
        with self._lock:
            self._kept.pop(written.ledger_id, None)
            self._kept[written.ledger_id] = written
            if len(self._kept) > KEPT_MAX:
                del self._kept[next(iter(self._kept))]

    def forget(self) -> None:
        """What was kept so far. For an index that begins: a ZooKeeper that was set up anew counts
        its transactions anew."""
        with self._lock:
            self._kept.clear()

    def take(self, ledger_id: int, zxid: int) -> VersionedMetadata | None:
        """What was written to the ledger in that transaction, once. None: not by us, or it is not
        kept any more."""
        with self._lock:
            written = self._kept.get(ledger_id)
            if written is None or written.stat.mzxid != zxid:
                return None
            return self._kept.pop(ledger_id)
