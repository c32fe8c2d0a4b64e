"""A visit that writes a ledger's metadata by hand: each write is recorded on this host, and proves
its session."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass

from daemon.settings import Settings
from daemon.state import open_journal
from daemon.visit import Visit, by_hand, visit
from ledgers.instance_id import read_instance_id
from ledgers.manager import LedgerManager
from ledgers.store import Check
from replication.cluster.membership import Membership
from replication.journal import ClusterJournal


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingVisit:
    """``manager``: journals what it writes. ``session``: proves that it is still ours (rule S3).

    ``cluster_id``: whose ledgers these are, None where nobody has said. ``holder``: what its locks
    say.
    """

    cluster: Visit
    manager: LedgerManager
    cluster_id: str | None
    session: Check
    holder: str


@asynccontextmanager
async def writing_visit(settings: Settings) -> AsyncIterator[WritingVisit]:
    """Errors are those of ``visit``; SettingsError also where nothing can be recorded."""
    with closing(open_journal(settings)) as journal:
        async with visit(settings, ends_with_loop=True) as cluster:
            cluster_id = await read_instance_id(cluster.store, settings.uri.root)
            manager = await LedgerManager.open(
                cluster.store, settings.uri, journal=ClusterJournal(journal, cluster_id).record
            )
            membership = await Membership.join(cluster.store, cluster.ur, by_hand())
            yield WritingVisit(
                cluster=cluster,
                manager=manager,
                cluster_id=cluster_id,
                session=membership.guard.check,
                holder=socket.gethostname(),
            )
