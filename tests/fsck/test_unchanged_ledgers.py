"""Finds the ledgers whose metadata is unchanged."""

import pytest

from auditor.fsck import ledger_list as module
from auditor.fsck.ledger_list import unchanged_ledgers
from tests.fsck.inspections import ALL, let_in, options
from tests.replication.cluster import Cluster, in_virtual_time, shut_out


def test_only_untouched_readable_ledgers_are_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @in_virtual_time
    async def scenario() -> None:
        cluster = await Cluster.start()
        let_in(monkeypatch, module, cluster)
        known, paths = {}, {each: cluster.manager.path(each) for each in range(1, 6)}
        for ledger_id in paths:
            await cluster.write_ledger(ALL, ledger_id=ledger_id, write_quorum=3)
            stat = (await cluster.manager.read(ledger_id)).stat
            known[ledger_id] = (stat.version, stat.mtime_ms)
        data, _ = await cluster.store.get(paths[2])
        await cluster.clock.sleep(1)

        await cluster.store.set(paths[2], data, version=-1)
        for ledger_id in (3, 4):
            await cluster.store.delete(paths[ledger_id])
        await cluster.write_ledger(ALL, ledger_id=4, write_quorum=3)

        shut_out(cluster.store, paths[5])

        assert await unchanged_ledgers(options(), known) == [1]

    scenario()
