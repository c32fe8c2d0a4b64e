"""The rows that the sources read from a cluster, without Spark.

``tests/cluster/test_fsck_on_spark.py`` reads them with Spark.
"""

import pytest

from auditor.fsck.spark import sources
from auditor.fsck.spark.sources import ClusterConnection, ledger_rows
from ledgers.errors import SettingsError
from ledgers.security import SecuritySettings
from tests.fsck.inspections import ALL, let_in
from tests.replication.cluster import Cluster, in_virtual_time, shut_out

REACH = ClusterConnection(metadata_service_uri="zk://127.0.0.1:2181/ledgers")


def test_an_unreadable_ledger_has_a_row_with_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @in_virtual_time
    async def scenario() -> None:
        cluster = await Cluster.start()
        let_in(monkeypatch, sources, cluster)
        for ledger_id in (1, 3, 4):
            await cluster.write_ledger(ALL, ledger_id=ledger_id, write_quorum=3)
        await cluster.store.set(cluster.manager.path(3), b"no metadata", version=0)
        shut_out(cluster.store, cluster.manager.path(4))

        found = [row async for rows in ledger_rows(REACH, [1, 2, 3, 4]) for row in rows]

        assert [row["ledger_id"] for row in found] == [1, 3, 4]
        assert [bool(row.get("error")) for row in found] == [False, True, True]

    scenario()


def test_the_sources_take_the_settings_of_security_as_options() -> None:
    options = {
        "metadataServiceUri": "zk://127.0.0.1:2181/ledgers",
        "security.bookie_tls": "True",
        "security.ca_file": "/etc/ca.pem",
    }

    connection = sources._connection_of(options)

    assert connection.security == SecuritySettings(bookie_tls=True, ca_file="/etc/ca.pem")
    with pytest.raises(
        SettingsError, match=r"security.bookie_tls is 'maybe'; allowed: true or false"
    ):
        sources._connection_of(options | {"security.bookie_tls": "maybe"})
