"""One ZooKeeper server: its settings, and when it is ready.

It does not wait for the disk (``forceSync=no``): quick, and fine for a cluster to try things on,
since killing it loses nothing; only a crash of the whole machine might.
"""

from pathlib import Path

from daemon.local.java import Java
from daemon.local.ports import LOOPBACK, ask
from daemon.local.processes import Child

MAIN_CLASS = "org.apache.zookeeper.server.ZooKeeperServerMain"
TICK_MS = 500
"""Session time-outs are rounded up to ticks, and two of them are the shortest there is."""
HEAP_MIB, DIRECT_MIB = 128, 32

PROPERTIES = {
    "zookeeper.forceSync": "no",
    "zookeeper.extendedTypesEnabled": "true",  # TTL nodes, which BookKeeper's clients may create
    "zookeeper.preAllocSize": "1024",  # KiB; its log files start at 64 MiB otherwise
    "zookeeper.admin.enableServer": "false",
    "zookeeper.4lw.commands.whitelist": "*",
}


def start_zookeeper(
    folder: Path, *, port: int, java: Java, classpath: str, logging: Path, log: Path
) -> Child:
    """A server on the data in ``folder``; see ``is_ready``."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    settings = folder / "zoo.cfg"
    settings.write_text(
        f"dataDir={folder / 'data'}\n"
        f"clientPort={port}\n"
        f"clientPortAddress={LOOPBACK}\n"
        f"tickTime={TICK_MS}\n"
        "maxSessionTimeout=120000\n"
        "maxClientCnxns=0\n"
    )
    command = java.command(
        MAIN_CLASS,
        [str(settings)],
        classpath=classpath,
        heap_mib=HEAP_MIB,
        direct_mib=DIRECT_MIB,
        temporary=temporary,
        properties={**PROPERTIES, "log4j2.configurationFile": str(logging)},
    )
    return Child("zookeeper", command, log=log)


def is_ready(port: int) -> bool:
    return ask(port, b"srvr").startswith(b"Zookeeper version")


def monitor(port: int) -> dict[str, str]:
    """What ``mntr`` says, e.g. ``zk_packets_received``; empty when it does not answer."""
    lines = ask(port, b"mntr").decode(errors="replace").splitlines()
    return dict(line.split("\t", 1) for line in lines if "\t" in line)
