"""The servers of a cluster: their settings, and their processes, each in a folder of its own.

``Servers`` starts processes and does not wait until they are ready. ZooKeeper does not wait for the
disk (``forceSync=no``). That is quick, and safe enough for trials: killing the server loses
nothing, only a crash of the whole machine might.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemon.local import jars
from daemon.local.java import Java
from daemon.local.ports import LOOPBACK, ask, loopback_interface, replies
from daemon.local.processes import Child, Found, find
from daemon.local.spec import TICK_MS, ClusterSpec, Storage, port_of
from ledgers.model import BookieId
from ledgers.wire import v3
from ledgers.wire.framing import frame

LOG4J_SETTINGS = """\
status = error
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{ISO8601} %-5p [%t] %c{1}: %m %X%n
rootLogger.level = info
rootLogger.appenderRef.out.ref = out
"""
"""Logs to standard output, which is each process's log file. %X prints the variable fields in
4.18."""

ZOOKEEPER_CLASS = "org.apache.zookeeper.server.ZooKeeperServerMain"
ZOOKEEPER_HEAP_MIB, ZOOKEEPER_DIRECT_MIB = 128, 32

ZOOKEEPER_PROPERTIES = {
    "zookeeper.forceSync": "no",
    "zookeeper.extendedTypesEnabled": "true",  # TTL nodes, which BookKeeper's clients may create
    "zookeeper.preAllocSize": "1024",  # KiB; otherwise its log files start at 64 MiB
    "zookeeper.admin.enableServer": "false",
    "zookeeper.4lw.commands.whitelist": "*",
}

BOOKIE_CLASS = "org.apache.bookkeeper.server.Main"
AUTORECOVERY_CLASS = "org.apache.bookkeeper.replication.AutoRecoveryMain"
BOOKIE_HEAP_MIB, BOOKIE_DIRECT_MIB = 96, 64

# The packages that BookKeeper's own scripts open to a bookie, for direct buffers, their checksums
# and posix_fadvise.
BOOKIE_JVM_FLAGS = tuple(
    f"--add-opens=java.base/{package}=ALL-UNNAMED"
    for package in ("java.nio", "jdk.internal.misc", "java.io", "java.util.zip")
)
# The bench compares bookmender with AutoRecovery, so AutoRecovery runs with an operator's settings,
# not with minimal ones.
AUTORECOVERY_JVM_FLAGS = (
    "-Xmx512m",
    "-XX:MaxDirectMemorySize=512m",
    "-XX:TieredStopAtLevel=4",
    "-XX:ReservedCodeCacheSize=240m",
)

NETTY_PROPERTIES = {
    "io.netty.tryReflectionSetAccessible": "true",
    "io.netty.allocator.numDirectArenas": "1",
    "io.netty.allocator.numHeapArenas": "1",
    "io.netty.leakDetection.level": "disabled",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Starts and finds servers. ``data``: the folder of the cluster, absolute. ``java``: None: it
    is looked for when it is needed. ``is_bound``: the servers end with this process."""

    data: Path
    java: Java | None = None
    is_bound: bool = True
    lock: int | None = None
    """A file descriptor that the servers keep open, and with it the lock of the folder."""

    @property
    def logs(self) -> Path:
        return self.data / "logs"

    def find(self, name: str) -> Child | None:
        """Return the running server of this name: ``zookeeper`` or ``bookie-PORT``."""
        pid = find(self._mark(name))
        log = self.logs / f"{name}.log"
        return None if pid is None else Found(name, pid, self._mark(name), log=log)

    def _mark(self, name: str) -> str:
        """Return the argument by which a later command finds the server. A folder in a container
        may have the same path, so its inode is part of the argument."""
        return f"-Dbookmender.server={name}-{self.data.stat().st_ino}-{self.data}"

    def zookeeper(
        self,
        spec: ClusterSpec,
        *,
        heap_mib: int = ZOOKEEPER_HEAP_MIB,
        flags: Sequence[str] = (),
    ) -> Child:
        """Start ZooKeeper. ``heap_mib``: 1 GiB holds a million ledgers.

        ``flags``: JVM flags that override the defaults, which keep the JVM small.
        """
        folder = self.data / "zookeeper"
        return self._spawn(
            "zookeeper",
            folder,
            [ZOOKEEPER_CLASS],
            settings={
                "dataDir": str(folder / "data"),
                "clientPort": str(spec.zookeeper_port),
                "clientPortAddress": LOOPBACK,
                "tickTime": str(TICK_MS),
                "maxSessionTimeout": "120000",
                "maxClientCnxns": "0",
                **spec.zookeeper_settings,
            },
            properties=ZOOKEEPER_PROPERTIES,
            classpath=jars.zookeeper_classpath(spec.bookkeeper),
            heap_mib=heap_mib,
            direct_mib=ZOOKEEPER_DIRECT_MIB,
            flags=[*flags, *spec.zookeeper_jvm_flags],
        )

    def bookie(self, spec: ClusterSpec, bookie_id: BookieId) -> Child:
        folder, port = self.bookie_folder(bookie_id), port_of(bookie_id)
        draft = self._archive_draft if bookie_id == spec.bookies[0] else None
        if draft is not None:
            draft.unlink(missing_ok=True)  # left by a run that was interrupted
        return self._spawn_bookkeeper(
            f"bookie-{port}",
            folder,
            BOOKIE_CLASS,
            bookie_settings(spec, port=port, folder=folder),
            spec=spec,
            flags=[
                *jars.archive_flags(self._archive(spec), draft=draft),
                *spec.bookie_jvm_flags,
            ],
        )

    def keep_archive(self, spec: ClusterSpec) -> None:
        """Keep the class archive. Call this when the first bookie has ended normally; see
        ``jars``."""
        if self._archive_draft.exists():
            jars.keep_archive(self._archive_draft, self._archive(spec))

    def _archive(self, spec: ClusterSpec) -> Path:
        return jars.archive_path(jars.jars_folder(spec.bookkeeper), self.java or Java.find())

    @property
    def _archive_draft(self) -> Path:
        return self.data / "bookies" / "classes.jsa"

    def bookie_folder(self, bookie_id: BookieId) -> Path:
        return self.data / "bookies" / str(port_of(bookie_id))

    def has_data(self, bookie_id: BookieId) -> bool:
        """Return True if the bookie was started at least once, and not wiped since."""
        return (self.bookie_folder(bookie_id) / "ledgers" / "current" / "VERSION").exists()

    def autorecovery(
        self,
        spec: ClusterSpec,
        name: str,
        *,
        port: int,
        settings: Mapping[str, str],
    ) -> Child:
        """Start Java's AutoRecovery. ``port``: only names it in elections and locks; it does not
        listen."""
        return self._spawn_bookkeeper(
            name,
            self.data / "autorecovery" / name,
            AUTORECOVERY_CLASS,
            {**COMMON_SETTINGS, **_place_in_cluster(spec, port), **settings},
            spec=spec,
            flags=AUTORECOVERY_JVM_FLAGS,
        )

    def _spawn_bookkeeper(
        self,
        name: str,
        folder: Path,
        main_class: str,
        settings: Mapping[str, str],
        *,
        spec: ClusterSpec,
        flags: Sequence[str],
    ) -> Child:
        return self._spawn(
            name,
            folder,
            [main_class, "--conf"],
            settings=settings,
            properties=NETTY_PROPERTIES,
            classpath=jars.bookkeeper_classpath(spec.bookkeeper),
            heap_mib=BOOKIE_HEAP_MIB,
            direct_mib=BOOKIE_DIRECT_MIB,
            flags=[*BOOKIE_JVM_FLAGS, *flags],
        )

    def _spawn(
        self,
        name: str,
        folder: Path,
        main: Sequence[str],
        *,
        settings: Mapping[str, str],
        properties: Mapping[str, str],
        classpath: str,
        heap_mib: int,
        direct_mib: int,
        flags: Sequence[str] = (),
    ) -> Child:
        """Start a JVM. ``main``: the class and its arguments, up to the settings file, which comes
        last."""
        temporary = folder / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        logging = self.data / "log4j2.properties"
        logging.write_text(LOG4J_SETTINGS)
        settings_file = folder / "settings.conf"
        settings_file.write_text("".join(f"{k}={v}\n" for k, v in settings.items()))
        command = (self.java or Java.find()).command(
            [*main, str(settings_file)],
            classpath=classpath,
            heap_mib=heap_mib,
            direct_mib=direct_mib,
            temporary=temporary,
            properties={**properties, "log4j2.configurationFile": str(logging)},
            flags=[self._mark(name), *flags],
        )
        return Child(
            name, command, log=self.logs / f"{name}.log", is_bound=self.is_bound, keeps=self.lock
        )


COMMON_SETTINGS = {
    "httpServerEnabled": "false",
    "enableStatistics": "false",
    "allowLoopback": "true",
    "advertisedAddress": LOOPBACK,
}

# The bookies are real in every respect except size: the journal is synced, compaction runs.
BOOKIE_SETTINGS = {
    **COMMON_SETTINGS,
    "journalPreAllocSizeMB": "1",
    "journalMaxSizeMB": "64",
    "journalMaxBackups": "0",
    "logSizeLimit": str(64 << 20),
    "entryLogFilePreallocationEnabled": "false",
    "serverNumIOThreads": "1",
    "numAddWorkerThreads": "1",
    "numReadWorkerThreads": "1",
    "numLongPollWorkerThreads": "1",
    "numHighPriorityWorkerThreads": "1",
    "numJournalCallbackThreads": "1",
    "allocatorPoolingConcurrency": "1",
    # The disk of a laptop is often nearly full. That must not make bookies read-only.
    "diskUsageThreshold": "0.99",
    "diskUsageWarnThreshold": "0.98",
    "diskUsageLwmThreshold": "0.98",
    "minUsableSizeForIndexFileCreation": "0",
    "minUsableSizeForEntryLogCreation": "0",
}

STORAGE_SETTINGS: Mapping[Storage, Mapping[str, str]] = {
    Storage.SORTED: {"skipListSizeLimit": str(8 << 20), "pageLimit": "1024"},
    Storage.INTERLEAVED: {"pageLimit": "1024"},
    Storage.DB: {
        "dbStorage_writeCacheMaxSizeMb": "16",
        "dbStorage_readAheadCacheMaxSizeMb": "8",
        "dbStorage_rocksDB_blockCacheSize": str(8 << 20),
        "dbStorage_rocksDB_writeBufferSizeMB": "4",
    },
}


def bookie_settings(spec: ClusterSpec, *, port: int, folder: Path) -> dict[str, str]:
    """Return all settings of a bookie. The user's own settings come last and win."""
    return {
        **BOOKIE_SETTINGS,
        **STORAGE_SETTINGS[spec.storage],
        **_place_in_cluster(spec, port),
        "listeningInterface": loopback_interface(),  # default: every interface
        "ledgerStorageClass": spec.storage.java_class,
        "journalDirectories": str(folder / "journal"),
        "ledgerDirectories": str(folder / "ledgers"),
        **spec.bookie_settings,
    }


def _place_in_cluster(spec: ClusterSpec, port: int) -> dict[str, str]:
    return {
        "metadataServiceUri": spec.metadata_service_uri,
        "zkTimeout": str(int(spec.session_timeout_s * 1000)),
        "bookiePort": str(port),
    }


def is_zookeeper_ready(port: int) -> bool:
    return ask(port, b"srvr").startswith(b"Zookeeper version")


def is_bookie_ready(port: int) -> bool:
    """Return True if the bookie answers requests.

    A bookie registers and listens before it serves: until then it closes each new connection
    (``BookieNettyServer.RejectRequestHandler``). Afterwards each bookie replies to START_TLS, with
    TLS or without, before any authentication.
    """
    return replies(port, frame(v3.encode_handshake(v3.StartTls(), 1)))


def zookeeper_monitor(port: int) -> dict[str, str]:
    """Return the answer to ``mntr``, e.g. ``zk_packets_received``; empty if the server does not
    answer."""
    lines = ask(port, b"mntr").decode(errors="replace").splitlines()
    return dict(line.split("\t", 1) for line in lines if "\t" in line)
