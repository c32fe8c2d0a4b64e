"""A cluster of Pulsar's metadata driver: bookies, AutoRecovery and Java's client use it.

The driver makes all znodes of the cluster. Its URI names a chroot, so that the ledgers root is
``/ledgers/ledgers``.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from daemon.local import jars, servers
from daemon.local.java import Java
from daemon.local.ports import free_ports
from daemon.local.processes import Child, wait_until
from daemon.local.spec import ClusterSpec, bookie_id
from ledgers.model import BookieId
from tests.cluster.beside_java import QUICK
from tests.java.shell import MAIN_CLASS, VERSION
from tests.java.tool import JavaTool
from tests.prepare import PULSAR_DRIVER, fetch_for_tests
from tests.zookeeper_server import ZooKeeperServer, running_zookeeper

PROPERTIES = {
    f"bookkeeper.metadata.{each.lower()}.drivers": (
        f"org.apache.pulsar.metadata.bookkeeper.PulsarMetadata{each}Driver"
    )
    for each in ("Bookie", "Client")
}
START_TIMEOUT_S = 60.0
SHELL_TIMEOUT_S = 100.0
SESSION_TIMEOUT = {"zkTimeout": "2000"}


class PulsarCluster:
    """The servers of a cluster, which the caller ends (``running_pulsar``)."""

    def __init__(self, folder: Path, zookeeper: ZooKeeperServer) -> None:
        self._folder, self._java = folder, Java.find()
        self.uri = f"metadata-store:zk:{zookeeper.address}/ledgers"
        jars.fetch(VERSION)
        self._more_jars = f"{fetch_for_tests(PULSAR_DRIVER)}/*"
        self.children: list[Child] = []
        self._bookies: dict[BookieId, Child] = {}

    @property
    def bookies(self) -> list[BookieId]:
        return list(self._bookies)

    def start_bookies(self, count: int) -> None:
        ports = free_ports(count)
        for port in ports:
            folder = self._folder / f"bookie-{port}"
            spec = ClusterSpec(zookeeper_port=1, bookie_ports=())
            settings = servers.bookie_settings(spec, port=port, folder=folder)
            self._bookies[bookie_id(port)] = self._start(
                f"bookie-{port}", servers.BOOKIE_CLASS, settings, flags=servers.BOOKIE_JVM_FLAGS
            )
        wait_until(
            lambda: all(map(servers.is_bookie_ready, ports)),
            self.children,
            timeout_s=START_TIMEOUT_S,
        )

    def kill_bookie(self, bookie: BookieId) -> None:
        self._bookies[bookie].kill()

    def start_autorecovery(self, name: str) -> Child:
        (port,) = free_ports(1)
        settings = {**servers.COMMON_SETTINGS, **QUICK, "bookiePort": str(port)}
        return self._start(name, servers.AUTORECOVERY_CLASS, settings)

    def client(self) -> JavaTool:
        return JavaTool(VERSION, more_jars=self._more_jars, properties=PROPERTIES)

    def format(self) -> None:
        """Create the znodes of a new cluster, as ``bookkeeper shell`` does."""
        command = self._command("shell", MAIN_CLASS, "-conf", {"allowLoopback": "true"})
        ended = subprocess.run(
            [*command, "initnewcluster"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SHELL_TIMEOUT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr

    def _start(
        self, name: str, main: str, settings: Mapping[str, str], *, flags: tuple[str, ...] = ()
    ) -> Child:
        command = self._command(name, main, "--conf", settings, flags=flags)
        self.children.append(Child(name, command, log=self._folder / f"{name}.log"))
        return self.children[-1]

    def _command(
        self,
        name: str,
        main: str,
        option: str,
        settings: Mapping[str, str],
        *,
        flags: tuple[str, ...] = (),
    ) -> list[str]:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        settings_file, logging = folder / "settings.conf", folder / "log4j2.properties"
        settings = {**settings, **SESSION_TIMEOUT, "metadataServiceUri": self.uri}
        settings_file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        logging.write_text(servers.LOG4J_SETTINGS)
        return self._java.command(
            [main, option, str(settings_file)],
            classpath=os.pathsep.join([jars.bookkeeper_classpath(VERSION), self._more_jars]),
            heap_mib=128,
            direct_mib=64,
            temporary=folder,
            properties={
                **servers.NETTY_PROPERTIES,
                **PROPERTIES,
                "log4j2.configurationFile": str(logging),
            },
            flags=flags,
        )


@contextmanager
def running_pulsar(folder: Path, *, bookies: int) -> Iterator[PulsarCluster]:
    """Run a new cluster: ZooKeeper, and bookies of Pulsar's driver."""
    with running_zookeeper(folder) as zookeeper:
        cluster = PulsarCluster(folder, zookeeper)
        try:
            cluster.format()
            cluster.start_bookies(bookies)
            yield cluster
        finally:
            for child in cluster.children:
                child.kill()
