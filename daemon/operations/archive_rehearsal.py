"""A rehearsal of a disaster: restores an archive into a scratch ZooKeeper, and compares.

The ZooKeeper is started on this host, as for a local cluster, and removed at the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from archive.reading import Archive
from archive.restore import ALONE_LAST, RestorePlan, differences, live_ledgers, plan_restore
from archive.znodes import read_znodes
from checkpoints.model import ledger_id_of
from daemon.local import jars
from daemon.local.ports import LOOPBACK, free_ports
from daemon.local.processes import KILL_TIMEOUT_S, wait_until
from daemon.local.servers import ZOOKEEPER_HEAP_MIB, Servers, is_zookeeper_ready
from daemon.local.spec import ClusterSpec
from daemon.operations.archive_restore import OnLeft, Rehearsed, restore_cluster
from daemon.settings import Settings
from daemon.zookeeper import open_store
from ledgers.manager import LedgerManager
from ledgers.store import MetadataStore

READY_TIMEOUT_S: Final = 60.0
LEDGERS_A_MIB: Final = 1_000
"""Ledgers that ZooKeeper can keep in a MiB of its heap."""


def rehearse(archive: Archive, *, tell: Callable[[str], None], on_left: OnLeft) -> Rehearsed:
    """Restore the newest point, and compare. It blocks. Raises SettingsError without Java,
    CorruptionError, UnavailableError if ZooKeeper does not start."""
    plan = plan_restore(archive, archive.point(is_exact=False))
    heap_mib = ZOOKEEPER_HEAP_MIB + plan.ledger_count // LEDGERS_A_MIB
    jars.fetch(on_progress=lambda done, total: tell(f"downloading jar {done + 1} of {total}, once"))
    tell(f"restoring into a scratch ZooKeeper with {heap_mib} MiB of heap")
    (port,) = free_ports(1)
    spec = ClusterSpec(zookeeper_port=port, bookie_ports=())
    uri = f"zk+null://{LOOPBACK}:{port}{plan.point.header.root}"
    settings = Settings(metadata_service_uri=uri)

    async def restore() -> Rehearsed:
        began_s = time.monotonic()
        await restore_cluster(settings, archive, plan, on_left=on_left)
        duration_s = round(time.monotonic() - began_s, 1)
        async with open_store(settings) as store:
            return Rehearsed(
                ledger_count=plan.ledger_count,
                cookie_count=len(plan.bookies),
                duration_s=duration_s,
                different=await compare_all(store, archive, plan),
            )

    with TemporaryDirectory(prefix="bookmender-", ignore_cleanup_errors=True) as name:
        child = Servers(data=Path(name)).zookeeper(spec, heap_mib=heap_mib)
        try:
            wait_until(lambda: is_zookeeper_ready(port), [child], timeout_s=READY_TIMEOUT_S)
            return asyncio.run(restore())
        finally:
            child.kill()
            child.wait(timeout_s=KILL_TIMEOUT_S)


async def compare_all(store: MetadataStore, archive: Archive, plan: RestorePlan) -> list[str]:
    """Return the ledgers, cookies and other znodes for bookies that are not in ZooKeeper byte for
    byte as in the archive. Raises CorruptionError, UnavailableError."""
    manager = LedgerManager(store, plan.point.header.root, plan.layout)
    live = await live_ledgers(store, manager)
    live += [record async for record in read_znodes(store, manager)]
    found = []
    for each in differences(archive.state(plan.point), live):
        if (ledger_id := ledger_id_of(each.key)) is not None:
            found.append(f"ledger {ledger_id}")
        elif (path := each.key[1:].decode()).startswith(("cookies", *ALONE_LAST)):
            found.append(path)
    return found
