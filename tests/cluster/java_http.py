"""A real bookie with BookKeeper's own HTTP server, to compare our answers with."""

import asyncio
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from daemon.local import jars, servers
from daemon.local.cluster import LocalCluster
from daemon.local.java import Java
from daemon.local.ports import LOOPBACK, free_ports
from daemon.local.processes import Child, stop_all
from tests.cluster.steps import wait_for
from tests.prepare import HTTP_SERVER, fetch_for_tests

SERVER_CLASS = "org.apache.bookkeeper.http.vertx.VertxHttpServer"
TIMEOUT_S = 60.0
Answer = tuple[int, str]


@asynccontextmanager
async def java_http_server(cluster: LocalCluster, folder: Path) -> AsyncIterator[str]:
    """Start another bookie of the cluster, and yield the address of its HTTP server."""
    java, version = Java.find(), cluster.spec.bookkeeper
    vertx = fetch_for_tests(HTTP_SERVER)
    port, http_port = free_ports(2)
    settings = {
        **servers.bookie_settings(cluster.spec, port=port, folder=folder),
        "httpServerEnabled": "true",
        "httpServerClass": SERVER_CLASS,
        "httpServerHost": LOOPBACK,
        "httpServerPort": str(http_port),
    }
    file, temporary = folder / "bookie.conf", folder / "tmp"
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    temporary.mkdir()
    command = java.command(
        [servers.BOOKIE_CLASS, "--conf", str(file)],
        classpath=os.pathsep.join((jars.bookkeeper_classpath(version), f"{vertx}/*")),
        heap_mib=servers.BOOKIE_HEAP_MIB,
        direct_mib=servers.BOOKIE_DIRECT_MIB,
        temporary=temporary,
        properties=servers.NETTY_PROPERTIES,
        flags=servers.BOOKIE_JVM_FLAGS,
    )
    child = Child("http-bookie", command, log=folder / "bookie.log")
    base = f"http://{LOOPBACK}:{http_port}"

    async def answers() -> bool:
        assert child.is_running, child.log.read_text()[-2_000:]
        try:
            return (await ask(base, "/heartbeat"))[0] == 200
        except OSError:
            return False

    try:
        await wait_for(answers, "answer of Java's HTTP server")
        yield base
    finally:
        await asyncio.to_thread(stop_all, [child], timeout_s=TIMEOUT_S)


async def ask(
    base: str, path: str, method: str = "GET", *, body: bytes | None = None, token: str = ""
) -> Answer:
    """Return the status and the text of the answer."""

    def asking() -> Answer:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(base + path, data=body, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(asking)
