"""The HTTP application on a cluster in memory, with a client."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence, Set
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
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
from ledgers.model import BookieId
from tests.daemon.in_memory import nothing
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster
from tests.replication.nodes import ROOT

URI = f"zk+hierarchical://zk:2181{ROOT}"
PATIENCE_S = 60.0
TOKEN = "a-token-of-enough-length"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
DOCUMENT = describe()

Client = TestClient[Request, Application]


Scene = Callable[[Cluster], Awaitable[None]]


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


def without_arguments(
    test: Callable[..., Any], given: Set[str], run: Callable[[dict[str, Any]], None]
) -> Callable[..., None]:
    """Return a test that runs ``run`` with its fixtures: the arguments that are not ``given``."""

    def run_test(**fixtures: Any) -> None:
        run(fixtures)

    run_test.__name__, run_test.__doc__ = test.__name__, test.__doc__
    wanted = inspect.signature(test).parameters
    run_test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each for name, each in wanted.items() if name not in given]
    )
    return run_test


def over_http(
    scene: Scene = nothing,
    *,
    bookies: Sequence[BookieId] = (),
    has_token: bool = False,
    address: str = "127.0.0.1",
    mode: str = "repair",
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Return a decorator for a test that gets ``client``, if it wants ``cluster``, and fixtures.

    ``scene``: prepares the cluster. ``has_token``: the node has a file with ``TOKEN``.
    """

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        wanted = inspect.signature(test).parameters

        async def run(token: Path, fixtures: dict[str, Any]) -> None:
            http = HttpSettings(address=address, token_file=str(token) if has_token else "")
            cluster = await Cluster.start(*bookies)
            await scene(cluster)
            if "cluster" in wanted:
                fixtures["cluster"] = cluster
            async with (
                asyncio.timeout(PATIENCE_S),
                serving(cluster, http, mode=mode) as client,
            ):
                await test(client=client, **fixtures)

        def run_it(fixtures: dict[str, Any]) -> None:
            with TemporaryDirectory() as folder:
                token = Path(folder, "token")
                token.write_text(TOKEN)
                asyncio.run(run(token, fixtures))

        return without_arguments(test, {"client", "cluster"}, run_it)

    return decorate
