"""Bookies that require authentication (SASL): every path to them reports that as the reason."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.errors import AuthenticationRequiredError
from tests.cluster.our_client import our_client
from tests.cluster.steps import WORKER_ONLY, events, start_node, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="secured"), pytest.mark.timeout(240)]

SASL = {
    "bookieAuthProviderFactoryClass": "org.apache.bookkeeper.sasl.SASLBookieAuthProviderFactory"
}
LOGIN = """
Bookie {
  org.apache.zookeeper.server.auth.DigestLoginModule required user_somebody="secret";
};
"""


@pytest.fixture(scope="module")
def cluster_options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    login = tmp_path_factory.mktemp("sasl") / "jaas.conf"
    login.write_text(LOGIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JDK_JAVA_OPTIONS", f"-Djava.security.auth.login.config={login}")
        yield {"bookie_settings": SASL}


def test_requests_over_v3_fail_with_authentication_required(module_cluster: LocalCluster) -> None:
    async def run() -> None:
        async with our_client(module_cluster.metadata_service_uri) as client:
            bookie = module_cluster.bookies[0]
            with pytest.raises(AuthenticationRequiredError):
                await client.bookies.room(bookie)
            with pytest.raises(AuthenticationRequiredError):
                await client.bookies.read(bookie, 1, 0)

    asyncio.run(run())


def test_a_node_quarantines_such_bookies_and_logs_why(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    async def run() -> None:
        node = start_node(
            "node", module_cluster.metadata_service_uri, tmp_path, settings=WORKER_ONLY
        )
        try:
            await wait_for(
                lambda: (
                    {e["bookie"] for e in events(node, "bookie.quarantined")}
                    == set(module_cluster.bookies)
                ),
                "every bookie in quarantine",
            )
            for event in events(node, "bookie.quarantined"):
                assert "requires authentication" in event["reason"]
        finally:
            await asyncio.to_thread(node.kill)

    asyncio.run(run())
