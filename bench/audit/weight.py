"""Measures the memory of the ledger map alone: it is filled in a separate process, with ledgers
like those of the field.

The memory of the daemon says less about it, because its read buffers have random sizes.
"""

import gc
import multiprocessing
import os
import random
from multiprocessing.connection import Connection

from auditor.ledger_map import LedgerMap
from bench.audit.field import SEED, Victim, drawn_ledgers
from bench.audit.records import Weight
from bench.usage import rss_bytes
from ledgers.errors import UnavailableError
from ledgers.store import Stat
from tests.znode_cluster import bookie

WARM_COUNT = 5_000
TIMEOUT_S = 600.0
STAT = Stat(version=1, czxid=10**12, mzxid=10**12)


def weigh_ledger_map(size: int) -> Weight:
    """Measure the ledger map. Raises UnavailableError on a timeout."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_fill_and_tell, args=(size, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(TIMEOUT_S):
            raise UnavailableError("the ledger map is not filled in time")
        return Weight(size=size, ledger_map_bytes=ours.recv())
    finally:
        process.kill()
        process.join()


def _fill_and_tell(size: int, connection: Connection) -> None:
    _filled(WARM_COUNT)
    gc.collect()
    before = rss_bytes(os.getpid())
    ledger_map = _filled(size)
    gc.collect()
    connection.send(rss_bytes(os.getpid()) - before)
    assert len(ledger_map) == size


def _filled(size: int) -> LedgerMap:
    ledger_map, none = LedgerMap(), Victim(bookie=bookie(0), ledger_ids=())
    for ledger_id, metadata in drawn_ledgers(random.Random(SEED), range(size), none):
        ledger_map.put(ledger_id, metadata, STAT)
    return ledger_map
