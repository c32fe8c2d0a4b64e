"""The jars: ZooKeeper's lie in the pyspark package, BookKeeper's are fetched once, by coordinates.

They are fetched with the Ivy that is in pyspark too, or with ``mvn`` where the user has set that
up, into the user's cache folder: complete or not there at all, by one process at a time.

Class-data sharing: a bookie's classes, loaded and checked once, from then on mapped into memory.

That saves each bookie a third of the work of its start. The first bookie of a cluster that finds no
archive records one when it ends in good order, which takes it two seconds more. A JVM checks that
an archive is of its own build and of these very jars, and does without it otherwise.
"""

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

from daemon.local.java import Java
from ledgers.errors import SettingsError, UnavailableError

BOOKKEEPER_DEFAULT = "4.18.0"
VERSION = re.compile(r"[0-9]+(\.[0-9]+)+([-.][A-Za-z0-9]+)*")


class Module(NamedTuple):
    """What is fetched, with all that it needs: the first two of its three coordinates."""

    organisation: str
    name: str

    def jar(self, version: str) -> str:
        return f"{self.name}-{version}.jar"


BOOKKEEPER = Module("org.apache.bookkeeper", "bookkeeper-server")
ZOOKEEPER = Module("org.apache.zookeeper", "zookeeper")
"""For servers of another release than that of pyspark's jars."""

# What a ZooKeeper server needs of Spark's jars: nothing else is put on its class path.
ZOOKEEPER_JARS = (
    "zookeeper-3*",
    "zookeeper-jute-*",
    "audience-annotations-*",
    "metrics-core-*",
    "netty-*",
    "snappy-java-*",
    "slf4j-api-*",
    "log4j-api-*",
    "log4j-core-*",
    "log4j-slf4j2-impl-*",
)

COMPLAINT = re.compile(r"UNRESOLVED|\bERROR\b|not found: ")
"""In a line of Ivy's or Maven's: what it could not do."""
COMPLAINT_CHARACTERS_MAX = 200

OnProgress = Callable[[int, int | None], None]
"""Told how many jars there are by now, and of how many (None: not known yet)."""


def bookkeeper_classpath(version: str, environment: Mapping[str, str] = os.environ) -> str:
    """Of the jars in the cache, which must be there (``fetch``)."""
    folder = jars_folder(version, environment)
    server = folder / BOOKKEEPER.jar(version)
    others = sorted(folder.glob("*.[jn]ar"))  # Ivy stores native archives under their own ending
    return os.pathsep.join(map(str, [server, *(jar for jar in others if jar != server)]))


def zookeeper_classpath(
    version: str | None = None, environment: Mapping[str, str] = os.environ
) -> str:
    """``version``: one in the cache, which must be there (``fetch``); None: that of pyspark."""
    if version is not None:
        folder = jars_folder(version, environment, module=ZOOKEEPER)
        return os.pathsep.join(map(str, sorted(folder.glob("*.jar"))))
    folder = spark_jars_folder()
    jars = sorted(jar for pattern in ZOOKEEPER_JARS for jar in folder.glob(f"{pattern}.jar"))
    if not any(jar.name.startswith("zookeeper-3") for jar in jars):
        raise SettingsError("pyspark's jars folder holds no ZooKeeper: reinstall pyspark")
    return os.pathsep.join(map(str, jars))


def spark_jars_folder() -> Path:
    """Found without importing pyspark, which takes seconds. Raises SettingsError without it."""
    found = importlib.util.find_spec("pyspark")
    if found is None or not found.submodule_search_locations:
        raise SettingsError(
            "the local cluster needs pyspark's jars: pip install 'bookmender[local]'"
        )
    return Path(found.submodule_search_locations[0]) / "jars"


def jars_folder(
    version: str, environment: Mapping[str, str] = os.environ, *, module: Module = BOOKKEEPER
) -> Path:
    cache = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = version if module == BOOKKEEPER else f"{module.name}-{version}"
    return Path(cache) / "bookmender" / "jars" / name


def fetch(
    version: str,
    java: Java,
    *,
    module: Module = BOOKKEEPER,
    on_progress: OnProgress = lambda done, total: None,
    environment: Mapping[str, str] = os.environ,
) -> Path:
    """The folder with the module's jars, fetched if need be. BookKeeper: 100 MB, a minute or two.

    Raises SettingsError for a version that there is not, UnavailableError when it cannot be
    fetched.
    """
    if not VERSION.fullmatch(version):
        raise SettingsError(f"{version!r} is no version of BookKeeper; {BOOKKEEPER_DEFAULT} is one")
    folder = jars_folder(version, environment, module=module)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever is second finds the jars when it has it
        if not folder.exists():
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder.parent) as workplace:
                _Fetch(module, version, java, Path(workplace), on_progress).run().rename(folder)
    return folder


class _Fetch:
    """One attempt to fetch one version into a workplace of its own."""

    def __init__(
        self, module: Module, version: str, java: Java, workplace: Path, on_progress: OnProgress
    ) -> None:
        self._module, self._version, self._java = module, version, java
        self._workplace, self._jars = workplace, workplace / "jars"
        self._on_progress = on_progress

    def run(self) -> Path:
        """The folder with all the jars. Begins with the tool that knows the user's mirrors."""
        tools = {"ivy": self._try_ivy, "mvn": self._try_maven}
        if (Path.home() / ".m2" / "settings.xml").exists():
            tools = dict(reversed(tools.items()))
        complaints = []
        for name, attempt in tools.items():
            shutil.rmtree(self._jars, ignore_errors=True)
            complaint = attempt()
            if complaint is None and self._is_complete():
                return self._jars
            complaints.append(f"{name}: {complaint or 'jars are missing'}")
        raise UnavailableError(
            f"cannot fetch {':'.join((*self._module, self._version))}: " + "; ".join(complaints)
        )

    def _try_ivy(self) -> str | None:
        """What went wrong, in one line; None when all went well."""
        complaint = self._run(self._ivy_command(*self._module, self._version))
        # A POM of log4j's names log4j-api twice, once for its tests, and Ivy then takes neither.
        for core in self._jars.glob("log4j-core-*.jar"):
            revision = core.stem.removeprefix("log4j-core-")
            if complaint is None and not (self._jars / f"log4j-api-{revision}.jar").exists():
                complaint = self._run(
                    self._ivy_command("org.apache.logging.log4j", "log4j-api", revision)
                )
        return complaint

    def _try_maven(self) -> str | None:
        maven = shutil.which("mvn")
        if maven is None:
            return "not found"
        project = self._workplace / "pom.xml"
        project.write_text(
            MAVEN_PROJECT.format(
                organisation=self._module.organisation,
                module=self._module.name,
                version=self._version,
            )
        )
        return self._run(
            [
                *(maven, "--batch-mode", "--file", str(project)),
                *("dependency:copy-dependencies", "-DincludeScope=runtime"),
                f"-DoutputDirectory={self._jars}",
            ]
        )

    def _is_complete(self) -> bool:
        return (self._jars / self._module.jar(self._version)).exists()

    def _run(self, command: list[str]) -> str | None:
        """What went wrong, in one line; None when all went well."""
        found = fetched = 0
        complaint = None
        with subprocess.Popen(
            command,
            cwd=self._workplace,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    found += line.startswith("\tfound ")
                    fetched += "[SUCCESSFUL ]" in line
                    self._on_progress(fetched, max(found, fetched) if fetched else None)
                    if complaint is None and COMPLAINT.search(line):
                        complaint = line.strip()[:COMPLAINT_CHARACTERS_MAX]
            except BaseException:  # Ctrl-C: nobody waits for it any more
                process.kill()
                raise
        if process.returncode == 0:
            return None
        return complaint or f"ended with code {process.returncode}"

    def _ivy_command(self, organisation: str, module: str, revision: str) -> list[str]:
        settings = Path.home() / ".ivy2" / "ivysettings.xml"
        if not settings.exists():
            settings = self._workplace / "ivysettings.xml"
            settings.write_text(IVY_SETTINGS.format(cache=quoteattr(str(self._workplace / "ivy"))))
        ivy = next(spark_jars_folder().glob("ivy-*.jar"), None)
        if ivy is None:
            raise SettingsError("pyspark's jars folder holds no Ivy: reinstall pyspark")
        return [
            *(str(self._java.executable), "-cp", str(ivy), "org.apache.ivy.Main"),
            *("-settings", str(settings)),
            *("-dependency", organisation, module, revision),
            *("-confs", "default"),
            *("-retrieve", f"{self._jars}/[artifact]-[revision](-[classifier]).[ext]"),
        ]


IVY_SETTINGS = """\
<ivysettings>
  <settings defaultResolver="default"/>
  <caches defaultCacheDir={cache}/>
  <resolvers><ibiblio name="default" m2compatible="true"/></resolvers>
</ivysettings>
"""

MAVEN_PROJECT = """\
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>bookmender</groupId> <artifactId>local</artifactId> <version>1</version>
  <dependencies>
    <dependency>
      <groupId>{organisation}</groupId>
      <artifactId>{module}</artifactId>
      <version>{version}</version>
    </dependency>
  </dependencies>
</project>
"""


def archive_path(jars_folder: Path, java: Java) -> Path:
    """Among the jars, so that it goes when they go."""
    return jars_folder / f"bookie-java-{java.version}.jsa"


def flags(archive: Path, *, draft: Path | None) -> tuple[str, ...]:
    """For a bookie's JVM. ``draft``: where it shall record an archive if there is none."""
    if archive.exists():
        return (f"-XX:SharedArchiveFile={archive}",)
    if draft is None:
        return ()
    return (f"-XX:ArchiveClassesAtExit={draft}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off")


def keep(draft: Path, archive: Path) -> None:
    """Put a draft, if there is one, where others find it. It must be complete: its JVM has
    ended."""
    if not draft.exists():
        return
    copy = archive.with_name(f"{archive.name}.{os.getpid()}")
    shutil.copyfile(draft, copy)  # the two may lie on different disks
    os.replace(copy, archive)
    draft.unlink()
