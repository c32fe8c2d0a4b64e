"""Finds and downloads the jars. ZooKeeper's are in the pyspark package; BookKeeper's are downloaded
once.

The download uses the Ivy that is in pyspark, or ``mvn`` if the user has configured it. One process
at a time downloads into the user's cache folder, and a jars folder there is always complete.

Class-data sharing: the classes of a bookie are loaded and verified once, and later mapped into
memory. That saves each bookie a third of its start. If there is no archive, the first bookie of a
cluster records one when it stops normally, which takes two seconds. A JVM checks that an archive
belongs to its own build and to these jars, and ignores it otherwise.
"""

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

from daemon.home import home_folder
from daemon.local.java import Java
from ledgers.errors import SettingsError, UnavailableError

BOOKKEEPER_DEFAULT = "4.18.0"
VERSION = re.compile(r"[0-9]+(\.[0-9]+)+([-.][A-Za-z0-9]+)*")


class Module(NamedTuple):
    """A Maven module that is downloaded with its dependencies. The first two of its three
    coordinates."""

    organisation: str
    name: str

    def jar(self, version: str) -> str:
        return f"{self.name}-{version}.jar"


BOOKKEEPER = Module("org.apache.bookkeeper", "bookkeeper-server")

# The jars of Spark that a ZooKeeper server needs. No others are on its class path.
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
"""Matches a line of Ivy's or Maven's output that names an error."""
COMPLAINT_CHARACTERS_MAX = 200

OnProgress = Callable[[int, int | None], None]
"""Receives the number of jars downloaded so far, and the total (None: not known yet)."""


def bookkeeper_classpath(version: str) -> str:
    """Return the class path of the jars in the cache. They must have been downloaded
    (``fetch``)."""
    folder = jars_folder(version)
    server = folder / BOOKKEEPER.jar(version)
    others = sorted(folder.glob("*.[jn]ar"))  # Ivy stores native archives with their own suffix
    return os.pathsep.join(map(str, [server, *(jar for jar in others if jar != server)]))


def zookeeper_classpath() -> str:
    """Return the class path of the ZooKeeper in pyspark."""
    folder = spark_jars_folder()
    jars = sorted(jar for pattern in ZOOKEEPER_JARS for jar in folder.glob(f"{pattern}.jar"))
    if not any(jar.name.startswith("zookeeper-3") for jar in jars):
        raise SettingsError("pyspark's jars folder contains no ZooKeeper: reinstall pyspark")
    return os.pathsep.join(map(str, jars))


def spark_jars_folder() -> Path:
    """Return the folder of pyspark's jars without importing pyspark, which takes seconds. Raises
    SettingsError if pyspark is not installed."""
    found = importlib.util.find_spec("pyspark")
    if found is None or not found.submodule_search_locations:
        raise SettingsError(
            "the local cluster needs pyspark's jars: in bookmender's sources run pip install "
            "'.[local]' in this environment"
        )
    return Path(found.submodule_search_locations[0]) / "jars"


def jars_folder(version: str, *, module: Module = BOOKKEEPER) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache"
    name = version if module == BOOKKEEPER else f"{module.name}-{version}"
    return Path(cache) / "bookmender" / "jars" / name


def fetch(
    version: str,
    java: Java,
    *,
    module: Module = BOOKKEEPER,
    beside: Sequence[tuple[Module, str]] = (),
    on_progress: OnProgress = lambda done, total: None,
) -> Path:
    """Return the folder with the module's jars. Downloads them if necessary (BookKeeper: 100 MB, a
    minute or two).

    ``beside``: modules and versions to download into the same folder; then nothing else on which
    they depend is downloaded. Raises SettingsError if the version does not exist, UnavailableError
    if the download fails.
    """
    if not VERSION.fullmatch(version):
        raise SettingsError(
            f"{version!r} is not a version of BookKeeper; an example: {BOOKKEEPER_DEFAULT}"
        )
    folder = jars_folder(version, module=module)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the second process finds the jars when it gets the lock
        if not folder.exists():
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder.parent) as workplace:
                attempt = _Fetch(module, version, java, Path(workplace), beside, on_progress)
                attempt.run().rename(folder)
    return folder


class _Fetch:
    """One attempt to download one version into a temporary folder of its own."""

    def __init__(
        self,
        module: Module,
        version: str,
        java: Java,
        workplace: Path,
        beside: Sequence[tuple[Module, str]],
        on_progress: OnProgress,
    ) -> None:
        self._module, self._version, self._java = module, version, java
        self._workplace, self._jars = workplace, workplace / "jars"
        self._beside, self._on_progress = beside, on_progress

    def run(self) -> Path:
        """Return the folder with all jars. Tries Maven first if the user has configured it, since
        it knows the user's mirrors."""
        tools = {"ivy": self._try_ivy, "mvn": self._try_maven}
        if (home_folder() / ".m2" / "settings.xml").exists():
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
        """Download with Ivy. Return the error in one line; None after a success."""
        complaint = None
        for module, version in ((self._module, self._version), *self._beside):
            complaint = complaint or self._run(self._ivy_command(*module, version))
        # A POM of log4j names log4j-api twice, once for its tests. Ivy then takes neither.
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
                dependencies="".join(
                    MAVEN_DEPENDENCY.format(
                        organisation=module.organisation, module=module.name, version=version
                    )
                    for module, version in ((self._module, self._version), *self._beside)
                )
            )
        )
        return self._run(
            [
                *(maven, "--batch-mode", "--file", str(project)),
                *("dependency:copy-dependencies", "-DincludeScope=runtime"),
                f"-DexcludeTransitive={str(bool(self._beside)).lower()}",
                f"-DoutputDirectory={self._jars}",
            ]
        )

    def _is_complete(self) -> bool:
        return (self._jars / self._module.jar(self._version)).exists()

    def _run(self, command: list[str]) -> str | None:
        """Run the command. Return the error in one line; None after a success."""
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
            except BaseException:  # Ctrl-C: the result is no longer wanted
                process.kill()
                raise
        if process.returncode == 0:
            return None
        return complaint or f"ended with code {process.returncode}"

    def _ivy_command(self, organisation: str, module: str, revision: str) -> list[str]:
        settings = home_folder() / ".ivy2" / "ivysettings.xml"
        if not settings.exists():
            settings = self._workplace / "ivysettings.xml"
            settings.write_text(IVY_SETTINGS.format(cache=quoteattr(str(self._workplace / "ivy"))))
        ivy = next(spark_jars_folder().glob("ivy-*.jar"), None)
        if ivy is None:
            raise SettingsError("pyspark's jars folder contains no Ivy: reinstall pyspark")
        return [
            *(str(self._java.executable), "-cp", str(ivy), "org.apache.ivy.Main"),
            *("-settings", str(settings)),
            *("-dependency", organisation, module, revision),
            *(["-notransitive"] if self._beside else []),
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
{dependencies}  </dependencies>
</project>
"""
MAVEN_DEPENDENCY = """\
    <dependency>
      <groupId>{organisation}</groupId>
      <artifactId>{module}</artifactId>
      <version>{version}</version>
    </dependency>
"""


def archive_path(jars_folder: Path, java: Java) -> Path:
    """Return the path of the archive. It is in the jars folder, so it is deleted together with the
    jars."""
    return jars_folder / f"bookie-java-{java.version}.jsa"


def archive_flags(archive: Path, *, draft: Path | None) -> tuple[str, ...]:
    """Return the flags for a bookie's JVM. ``draft``: where the JVM records an archive if there is
    none."""
    if archive.exists():
        return (f"-XX:SharedArchiveFile={archive}",)
    if draft is None:
        return ()
    return (f"-XX:ArchiveClassesAtExit={draft}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off")


def keep_archive(draft: Path, archive: Path) -> None:
    """Move the draft, if there is one, to its final path. Its JVM must have ended, so that the
    draft is complete."""
    if not draft.exists():
        return
    copy = archive.with_name(f"{archive.name}.{os.getpid()}")
    shutil.copyfile(draft, copy)  # the two paths may be on different disks
    os.replace(copy, archive)
    draft.unlink()
