"""One ZooKeeper server: its settings, and when it is ready.

It does not wait for the disk (``forceSync=no``): quick, and fine for a cluster to try things on,
since killing it loses nothing; only a crash of the whole machine might.
"""

from pathlib import Path

from daemon.local.ports import LOOPBACK, ask

MAIN_CLASS = "org.apache.zookeeper.server.ZooKeeperServerMain"
TICK_MS = 500
"""Session time-outs are rounded up to ticks, and two of them are the shortest there is."""
SESSION_TIMEOUT_MIN_S = 2 * TICK_MS / 1000
SESSION_TIMEOUT_MAX_MS = 120_000
HEAP_MIB, DIRECT_MIB = 128, 32

PROPERTIES = {
    "zookeeper.forceSync": "no",
    "zookeeper.extendedTypesEnabled": "true",  # TTL nodes, which BookKeeper's clients may create
    "zookeeper.preAllocSize": "1024",  # KiB; its log files start at 64 MiB otherwise
    "zookeeper.admin.enableServer": "false",
    "zookeeper.4lw.commands.whitelist": "*",
}


def settings_text(folder: Path, *, port: int) -> str:
    """Of a server that keeps its data below ``folder``."""
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
    """What ``mntr`` says, e.g. ``zk_packets_received``; empty when it does not answer."""
    lines = ask(port, b"mntr").decode(errors="replace").splitlines()
    return dict(line.split("\t", 1) for line in lines if "\t" in line)
