"""The settings files of a bookie and of a Java AutoRecovery daemon."""

from collections.abc import Mapping
from pathlib import Path

from daemon.local.ports import LOOPBACK, loopback_interface
from daemon.local.spec import ClusterSpec, Storage

BOOKIE_CLASS = "org.apache.bookkeeper.server.Main"
AUTORECOVERY_CLASS = "org.apache.bookkeeper.replication.AutoRecoveryMain"
HEAP_MIB, DIRECT_MIB = 96, 64


# The packages that BookKeeper's own scripts open to a bookie, for direct buffers, their checksums
# and posix_fadvise.
JVM_FLAGS = tuple(
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


def autorecovery_settings(
    spec: ClusterSpec, *, port: int, settings: Mapping[str, str]
) -> dict[str, str]:
    """Return the settings of AutoRecovery. ``port``: only names the daemon in elections and locks;
    the daemon does not listen on it."""
    return {**COMMON_SETTINGS, **_place_in_cluster(spec, port), **settings}


def _place_in_cluster(spec: ClusterSpec, port: int) -> dict[str, str]:
    return {
        "metadataServiceUri": spec.metadata_service_uri,
        "zkTimeout": str(int(spec.session_timeout_s * 1000)),
        "bookiePort": str(port),
    }


def settings_text(settings: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in settings.items())
