"""TLS of the HTTP server, and client certificates instead of the token, on real connections."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from daemon.http import server
from daemon.http.app import App
from daemon.http.cluster_reader import ClusterReader
from daemon.http.server import listen
from daemon.http.tls import ServerTls
from daemon.local.security import Authority, Certificate
from daemon.settings import HttpSettings, Settings
from ledgers.errors import SettingsError
from tests.certificates import encrypted, need_openssl
from tests.daemon.http.serving import BEARER, TOKEN, URI
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster

PATIENCE_S = 60.0
DISABLE = "/api/v1/disable"
Test = Callable[["Tls", int], Awaitable[None]]


class Tls:
    """Certificates of a server and of clients, as files in a folder."""

    def __init__(self, folder: Path) -> None:
        need_openssl()
        self.folder = folder
        self.servers, self.clients = Authority(folder, "servers"), Authority(folder, "clients")
        self.server = self.servers.issue("server")
        self.token = folder / "token"
        self.token.write_text(TOKEN)

    @property
    def settings(self) -> HttpSettings:
        return HttpSettings(
            port=0,
            token_file=str(self.token),
            certificate_file=str(self.server.certificate),
            key_file=str(self.server.key),
            client_ca_file=str(self.clients.certificate),
        )

    def client(self, certificate: Certificate | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.servers.certificate))
        if certificate is not None:
            context.load_cert_chain(certificate.certificate, certificate.key)
        return context


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Tls(tmp_path_factory.mktemp("tls"))


def serve(tls: Tls, test: Test, settings: HttpSettings | None = None) -> None:
    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S), served(settings or tls.settings) as port:
            await test(tls, port)

    asyncio.run(run())


@asynccontextmanager
async def served(http: HttpSettings) -> AsyncIterator[int]:
    cluster = await Cluster.start()

    @asynccontextmanager
    async def open_cluster() -> AsyncIterator[Any]:
        yield visiting(cluster)

    reader = ClusterReader(open_cluster)
    app = App(
        Settings(metadata_service_uri=URI, http=http),
        [],
        reader=reader,
        open_cluster=open_cluster,
        start=lambda work: work.close(),
    ).build()
    with capture_logs() as logged:
        tasks = [asyncio.create_task(reader.run()), asyncio.create_task(listening(app, http))]
        try:
            while not (told := [e for e in logged if e["event"] == "http.listening"]):  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.01)
            yield told[0]["port"]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def listening(app: web.Application, http: HttpSettings) -> None:
    await listen(app, http)


async def ask(
    port: int,
    context: ssl.SSLContext | None,
    method: str = "POST",
    path: str = DISABLE,
    **headers: str,
) -> tuple[int, str]:
    """Send one request on a connection of its own. ``context``: None: without TLS."""
    scheme = "http" if context is None else "https"
    url = f"{scheme}://127.0.0.1:{port}{path}"
    async with (
        aiohttp.ClientSession() as client,
        client.request(method, url, ssl=context or False, headers=headers) as answer,
    ):
        return answer.status, await answer.text()


def test_a_certificate_of_the_ca_or_the_token_allows_changes(tls: Tls) -> None:
    known = tls.clients.issue("known")

    async def test(tls: Tls, port: int) -> None:
        assert (await ask(port, tls.client(known)))[0] == 200
        assert (await ask(port, tls.client(), **BEARER))[0] == 200
        status, told = await ask(port, tls.client())
        assert (status, "or a client certificate" in told) == (401, True)
        status, told = await ask(port, tls.client(known), Authorization="Bearer wrong-token-of-16")
        assert (status, "token is wrong" in told) == (401, True)
        assert (await ask(port, tls.client(), "GET", "/healthz"))[0] == 200

    serve(tls, test)


def test_without_a_token_file_a_certificate_is_needed(tls: Tls) -> None:
    known = tls.clients.issue("known")

    async def test(tls: Tls, port: int) -> None:
        assert (await ask(port, tls.client(known)))[0] == 200
        for headers in ({}, BEARER):
            status, told = await ask(port, tls.client(), **headers)
            assert (status, "needs a client certificate" in told) == (401, True)

    serve(tls, test, replace(tls.settings, token_file=""))


@pytest.mark.parametrize("fault", ["expired", "untrusted"])
def test_a_wrong_certificate_ends_the_connection(fault: str, tls: Tls) -> None:
    """Even with the token: the client believes that its certificate is used."""
    if fault == "expired":
        wrong = tls.clients.issue("expired", days=-1)
    else:
        wrong = Authority(tls.folder, "others").issue("untrusted")

    async def test(tls: Tls, port: int) -> None:
        with pytest.raises(aiohttp.ClientError):
            await ask(port, tls.client(wrong), **BEARER)
        assert (await ask(port, tls.client(), **BEARER))[0] == 200

    serve(tls, test)


def test_without_a_ca_of_clients_no_certificate_counts(tls: Tls) -> None:
    known = tls.clients.issue("known")

    async def test(tls: Tls, port: int) -> None:
        assert (await ask(port, tls.client(known)))[0] == 401
        assert (await ask(port, tls.client(known), **BEARER))[0] == 200

    serve(tls, test, replace(tls.settings, client_ca_file=""))


@pytest.mark.parametrize("header", ["Origin", "Sec-Fetch-Site"])
def test_a_web_page_changes_nothing_with_the_certificate_of_the_browser(
    header: str, tls: Tls
) -> None:
    known = tls.clients.issue("known")

    async def test(tls: Tls, port: int) -> None:
        status, told = await ask(port, tls.client(known), **{header: "https://evil.example"})
        assert (status, "browser" in told) == (403, True)

    serve(tls, test)


def test_a_client_without_tls_is_not_answered(tls: Tls) -> None:
    async def test(tls: Tls, port: int) -> None:
        with pytest.raises(aiohttp.ClientError):
            await ask(port, None, **BEARER)

    serve(tls, test)


def test_from_elsewhere_a_certificate_opens_the_api_and_the_page(tls: Tls) -> None:
    known, elsewhere = tls.clients.issue("known"), {"X-Forwarded-For": "10.0.0.9"}

    async def test(tls: Tls, port: int) -> None:
        for path in ("/api/v1/status", "/"):
            assert (await ask(port, tls.client(), "GET", path, **elsewhere))[0] == 401
            assert (await ask(port, tls.client(known), "GET", path, **elsewhere))[0] == 200

    serve(tls, test, replace(tls.settings, address="0.0.0.0"))


def test_changed_files_are_used_for_new_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "FOLLOW_S", 0.02)
    tls = Tls(tmp_path)
    others = Authority(tmp_path, "others")
    theirs = others.issue("theirs")

    async def test(tls: Tls, port: int) -> None:
        async def is_accepted() -> bool:
            try:
                return (await ask(port, tls.client(theirs)))[0] == 200
            except aiohttp.ClientError:
                return False

        assert not await is_accepted()
        tls.clients.certificate.write_text("no certificate")
        await asyncio.sleep(0.1)
        assert (await ask(port, tls.client(), **BEARER))[0] == 200, "the old files stay in use"
        shutil.copy(others.certificate, tls.clients.certificate)
        while not await is_accepted():  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.02)

    serve(tls, test)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"certificate_file": "/nowhere"}, "http.certificate_file: cannot read /nowhere"),
        ({"key_file": "clients.key"}, "is not the key of the certificate"),
        ({"key_file": "encrypted"}, "decrypt it"),
        ({"client_ca_file": "token"}, "http.client_ca_file: .* holds no PEM certificate"),
    ],
)
def test_a_wrong_file_is_named(change: dict[str, Any], told: str, tls: Tls) -> None:
    files = {
        "encrypted": str(encrypted(tls.server.key, "secret")),
        **{path.name: str(path) for path in tls.folder.iterdir()},
    }
    settings = replace(
        tls.settings, **{key: files.get(value, value) for key, value in change.items()}
    )

    with pytest.raises(SettingsError, match=told):
        ServerTls(settings).context()
