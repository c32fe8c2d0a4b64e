"""One ZooKeeper server: its settings, and its readiness.

It does not wait for the disk (``forceSync=no``). That is quick, and safe enough for trials: killing
the server loses nothing, only a crash of the whole machine might.
"""

from pathlib import Path

from daemon.local.ports import LOOPBACK, ask

MAIN_CLASS = "org.apache.zookeeper.server.ZooKeeperServerMain"
TICK_MS = 500
"""ZooKeeper rounds session timeouts up to ticks; the shortest timeout is two ticks."""
SESSION_TIMEOUT_MIN_S = 2 * TICK_MS / 1000
SESSION_TIMEOUT_MAX_MS = 120_000
HEAP_MIB, DIRECT_MIB = 128, 32

PROPERTIES = {
    "zookeeper.forceSync": "no",
    "zookeeper.extendedTypesEnabled": "true",  # TTL nodes, which BookKeeper's clients may create
    "zookeeper.preAllocSize": "1024",  # KiB; otherwise its log files start at 64 MiB
    "zookeeper.admin.enableServer": "false",
    "zookeeper.4lw.commands.whitelist": "*",
}


def settings_text(folder: Path, *, port: int) -> str:
    """Return the settings of a server that keeps its data below ``folder``."""
    return (
        f"dataDir={folder / 'data'}\n"
        f"clientPort={port}\n"
        f"clientPortAddress={LOOPBACK}\n"
        f"tickTime={TICK_MS}\n"
        f"maxSessionTimeout={SESSION_TIMEOUT_MAX_MS}\n"
        "maxClientCnxns=0\n"
    )


def is_ready(port: int) -> bool:
    return ask(port, b"srvr").startswith(b"Zookeeper version")


def monitor(port: int) -> dict[str, str]:
    """Return the answer to ``mntr``, e.g. ``zk_packets_received``; empty if the server does not
    answer."""
    lines = ask(port, b"mntr").decode(errors="replace").splitlines()
    return dict(line.split("\t", 1) for line in lines if "\t" in line)
