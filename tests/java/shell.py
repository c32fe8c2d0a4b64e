"""Java's ``bookkeeper shell``, run once for each command.

The default is 4.17, whose messages are whole lines of text. 4.18 prints fields of structured logs.
"""

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from daemon.local import jars
from daemon.local.java import Java
from daemon.local.servers import NETTY_PROPERTIES

MAIN_CLASS = "org.apache.bookkeeper.bookie.BookieShell"
VERSION = "4.17.3"
HEAP_MIB, DIRECT_MIB = 128, 64
TIMEOUT_S = 100.0
LOGGERS = (MAIN_CLASS, "org.apache.bookkeeper.tools")
"""The loggers that print the answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelled:
    """How a command ended, and the lines that it printed."""

    exit_code: int
    lines: list[str]


def java_shell(uri: str, *arguments: str, version: str = VERSION) -> Shelled:
    """Run ``bookkeeper shell`` with these arguments. It has no terminal to ask anything."""
    java = Java.find()
    jars.fetch(version)
    with tempfile.TemporaryDirectory(prefix="bookmender-shell-") as name:
        folder = Path(name)
        settings = folder / "bk_server.conf"
        settings.write_text(f"metadataServiceUri={uri}\nallowLoopback=true\n")
        logging = folder / "log4j2.properties"
        logging.write_text(_log_settings())
        command = java.command(
            [MAIN_CLASS, "-conf", str(settings), *arguments],
            classpath=jars.bookkeeper_classpath(version),
            heap_mib=HEAP_MIB,
            direct_mib=DIRECT_MIB,
            temporary=folder,
            properties={**NETTY_PROPERTIES, "log4j2.configurationFile": str(logging)},
            flags=jars.archive_flags(
                jars.archive_path(jars.jars_folder(version), java), draft=None
            ),
        )
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env=dict(os.environ),
        )
    return Shelled(exit_code=ended.returncode, lines=ended.stdout.splitlines())


def _log_settings() -> str:
    lines = [
        "status = error",
        "appender.out.type = Console",
        "appender.out.name = out",
        "appender.out.layout.type = PatternLayout",
        "appender.out.layout.pattern = %m%n",
        "rootLogger.level = off",
    ]
    for number, name in enumerate(LOGGERS):
        prefix = f"logger.l{number}"
        lines += [f"{prefix}.name = {name}", f"{prefix}.level = info"]
        lines += [f"{prefix}.appenderRef.out.ref = out"]
    return "\n".join(lines)
