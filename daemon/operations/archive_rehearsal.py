"""A rehearsal of a disaster: restores an archive into a scratch ZooKeeper, and compares.

The ZooKeeper is started for it on this host, as for a local cluster, and removed at the end. It
says nothing about bookies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from archive.places import Place
from archive.reading import Archive
from archive.restore import ALONE_LAST, RestorePlan, differences, live_ledgers
from checkpoints.model import ledger_id_of
from daemon.local import jars
from daemon.local.ports import LOOPBACK, free_ports
from daemon.local.processes import KILL_TIMEOUT_S, wait_until
from daemon.local.servers import ZOOKEEPER_HEAP_MIB, Servers, is_zookeeper_ready
from daemon.local.spec import ClusterSpec
from daemon.operations.archive_restore import Rehearsed, find_point, plan_of, restore_cluster
from daemon.settings import Settings
from daemon.zookeeper import open_store
from ledgers.errors import NoNodeError
from ledgers.manager import LedgerManager
from ledgers.store import MetadataStore

READY_TIMEOUT_S: Final = 60.0
LEDGERS_A_MIB: Final = 1_000
"""Ledgers that ZooKeeper can keep in a MiB of its heap."""


def rehearse(
    place: Place, *, tell: Callable[[str], None], on_progress: Callable[[int, int], None]
) -> Rehearsed:
    """Restore the newest point, and compare. It blocks. ``on_progress``: called with the ledgers
    that are written, and the number of all. Raises SettingsError without Java, CorruptionError,
    UnavailableError if ZooKeeper does not start."""
    plan = plan_of(place, find_point(place, None))
    heap_mib = ZOOKEEPER_HEAP_MIB + plan.ledger_count // LEDGERS_A_MIB
    tell(f"starting a scratch ZooKeeper with {heap_mib} MiB of heap, and restoring into it")
    with _zookeeper(heap_mib, tell=tell) as port:
        settings = Settings(
            metadata_service_uri=f"zk+null://{LOOPBACK}:{port}{plan.point.header.root}"
        )
        return asyncio.run(_restore(settings, place, plan, on_progress))


@contextmanager
def _zookeeper(heap_mib: int, *, tell: Callable[[str], None]) -> Iterator[int]:
    """Run a ZooKeeper for the block, and yield its port."""
    jars.fetch(on_progress=lambda done, total: tell(f"downloading jar {done + 1} of {total}, once"))
    with TemporaryDirectory(prefix="bookmender-", ignore_cleanup_errors=True) as name:
        (port,) = free_ports(1)
        spec = ClusterSpec(zookeeper_port=port, bookie_ports=())
        child = Servers(data=Path(name)).zookeeper(spec, heap_mib=heap_mib)
        try:
            wait_until(lambda: is_zookeeper_ready(port), [child], timeout_s=READY_TIMEOUT_S)
            yield port
        finally:
            child.kill()
            child.wait(timeout_s=KILL_TIMEOUT_S)


async def _restore(
    settings: Settings, place: Place, plan: RestorePlan, on_progress: Callable[[int, int], None]
) -> Rehearsed:
    began_s = time.monotonic()
    await restore_cluster(
        settings, place, plan, on_progress=lambda count: on_progress(count, plan.ledger_count)
    )
    duration_s = time.monotonic() - began_s
    async with open_store(settings) as store:
        different = await compare(store, plan.point.header.root, place, plan)
    return Rehearsed(
        ledger_count=plan.ledger_count,
        cookie_count=len(plan.bookies),
        duration_s=round(duration_s, 1),
        different=different,
    )


async def compare(store: MetadataStore, root: str, place: Place, plan: RestorePlan) -> list[str]:
    """Return the ledgers, cookies and other znodes that bookies need and that are not in ZooKeeper
    as the plan says. Raises CorruptionError, UnavailableError."""
    live = await live_ledgers(store, LedgerManager(store, root, plan.layout))
    records = Archive(place).state(plan.point)
    known = (record for record in records if record.ledger_id is not None)
    found = [f"ledger {ledger_id_of(each.key)}" for each in differences(known, live)]
    for path, data in plan.others.items():
        if path in ALONE_LAST or path.startswith("cookies"):
            try:
                present, _ = await store.get(f"{root}/{path}")
            except NoNodeError:
                present = None
            if present != data:
                found.append(path)
    return found
