"""The HTTP application on a cluster in memory, with a client."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.web import Application, Request
from jsonschema import Draft202012Validator

from daemon.admin_session import AdminSession
from daemon.http.app import App
from daemon.http.cluster_reader import ClusterReader
from daemon.http.openapi import describe
from daemon.role_state import NodeService
from daemon.settings import HttpSettings, NodeSettings, Settings
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster
from tests.replication.nodes import ROOT

URI = f"zk+hierarchical://zk:2181{ROOT}"
TOKEN = "a-token-of-enough-length"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
DOCUMENT = describe()

Client = TestClient[Request, Application]


class EpochClock:
    """A wall clock close to the stamps of the cluster in memory."""

    def wall_ms(self) -> int:
        return 1_700_000_000_000


@asynccontextmanager
async def serving(
    cluster: Cluster,
    http: HttpSettings | None = None,
    *,
    roles: Sequence[NodeService] = (),
    mode: str = "repair",
) -> AsyncIterator[Client]:
    settings = Settings(
        metadata_service_uri=URI, http=http or HttpSettings(), node=NodeSettings(mode=mode)
    )

    @asynccontextmanager
    async def open_cluster() -> AsyncIterator[AdminSession]:
        yield visiting(cluster)

    reader = ClusterReader(open_cluster)
    started = [asyncio.create_task(reader.run())]

    def start(work: Coroutine[Any, Any, None]) -> None:
        started.append(asyncio.create_task(work))

    app = App(settings, roles, reader=reader, open_cluster=open_cluster, start=start)
    try:
        async with TestClient(TestServer(app.build())) as client:
            yield client
    finally:
        for task in started:
            task.cancel()


async def checked(response: ClientResponse, path: str) -> Any:
    """Return the content of an answer. It must be as described for this path and status."""
    described = DOCUMENT["paths"][path][response.method.lower()]["responses"]
    assert str(response.status) in described, (path, response.status, await response.text())
    content = described[str(response.status)]["content"]
    assert response.content_type in content, (path, response.content_type)
    schema = {**content[response.content_type]["schema"], "components": DOCUMENT["components"]}
    value = (
        json.loads(await response.read())
        if response.content_type == "application/json"
        else await response.text()
    )
    Draft202012Validator(schema).validate(value)
    return value
