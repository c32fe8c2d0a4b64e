"""Starts the processes of a cluster, each in a folder of its own. Does not wait until they are
ready."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemon.local import bookie, jars, zookeeper
from daemon.local import jars as archive
from daemon.local.java import Java
from daemon.local.processes import Child
from daemon.local.spec import ClusterSpec, port_of
from ledgers.model import BookieId

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Starts servers. ``data``: the folder of the cluster, absolute."""

    data: Path
    java: Java

    @property
    def logs(self) -> Path:
        return self.data / "logs"

    def zookeeper(
        self,
        spec: ClusterSpec,
        *,
        version: str | None = None,
        heap_mib: int = zookeeper.HEAP_MIB,
        flags: Sequence[str] = (),
    ) -> Child:
        """Start ZooKeeper. ``version``: None: the version of pyspark's jars. ``heap_mib``: 1 GiB
        holds a million ledgers.

        ``flags``: JVM flags that override the defaults, which keep the JVM small.
        """
        folder = self.data / "zookeeper"
        return self._spawn(
            "zookeeper",
            folder,
            [zookeeper.MAIN_CLASS],
            settings=zookeeper.settings_text(folder, port=spec.zookeeper_port),
            properties=zookeeper.PROPERTIES,
            classpath=jars.zookeeper_classpath(version),
            heap_mib=heap_mib,
            direct_mib=zookeeper.DIRECT_MIB,
            flags=flags,
        )

    def bookie(self, spec: ClusterSpec, bookie_id: BookieId) -> Child:
        folder = self.bookie_folder(bookie_id)
        port = port_of(bookie_id)
        return self._spawn_bookkeeper(
            f"bookie-{port}",
            folder,
            bookie.BOOKIE_CLASS,
            bookie.bookie_settings(spec, port=port, folder=folder),
            spec=spec,
            flags=[*self._archive_flags(spec, bookie_id), *spec.bookie_jvm_flags],
        )

    def keep_archive(self, spec: ClusterSpec) -> None:
        """Keep the class archive. Call this when the first bookie has ended normally; see
        ``jars``."""
        archive.keep(self._archive_draft, self._archive(spec))

    def _archive_flags(self, spec: ClusterSpec, bookie_id: BookieId) -> tuple[str, ...]:
        if bookie_id != spec.bookies[0]:
            return archive.flags(self._archive(spec), draft=None)
        self._archive_draft.unlink(missing_ok=True)  # left by a run that was interrupted
        return archive.flags(self._archive(spec), draft=self._archive_draft)

    def _archive(self, spec: ClusterSpec) -> Path:
        return archive.archive_path(jars.jars_folder(spec.bookkeeper), self.java)

    @property
    def _archive_draft(self) -> Path:
        return self.data / "bookies" / "classes.jsa"

    def bookie_folder(self, bookie_id: BookieId) -> Path:
        return self.data / "bookies" / str(port_of(bookie_id))

    def has_data(self, bookie_id: BookieId) -> bool:
        """Return True if the bookie was started at least once, and not wiped since."""
        return (self.bookie_folder(bookie_id) / "ledgers" / "current" / "VERSION").exists()

    def autorecovery(
        self, spec: ClusterSpec, name: str, *, port: int, settings: Mapping[str, str]
    ) -> Child:
        return self._spawn_bookkeeper(
            name,
            self.data / "autorecovery" / name,
            bookie.AUTORECOVERY_CLASS,
            bookie.autorecovery_settings(spec, port=port, settings=settings),
            spec=spec,
            flags=bookie.AUTORECOVERY_JVM_FLAGS,
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
            settings=bookie.settings_text(settings),
            properties=bookie.NETTY_PROPERTIES,
            classpath=jars.bookkeeper_classpath(spec.bookkeeper),
            heap_mib=bookie.HEAP_MIB,
            direct_mib=bookie.DIRECT_MIB,
            flags=[*bookie.JVM_FLAGS, *flags],
        )

    def _spawn(
        self,
        name: str,
        folder: Path,
        main: Sequence[str],
        *,
        settings: str,
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
        settings_file.write_text(settings)
        command = self.java.command(
            [*main, str(settings_file)],
            classpath=classpath,
            heap_mib=heap_mib,
            direct_mib=direct_mib,
            temporary=temporary,
            properties={**properties, "log4j2.configurationFile": str(logging)},
            flags=flags,
        )
        return Child(name, command, log=self.logs / f"{name}.log")
