"""Compile the Java program on demand, into the user's cache folder.

The key is the sources and the BookKeeper version, because the same sources compile to other class
files against another version. So an existing folder is right and never changes.
"""

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from daemon.local import jars
from daemon.local.java import OLDEST_MAJOR, Java
from ledgers.errors import BookmenderError, SettingsError

SOURCES = Path(__file__).parent
NOTIFICATIONS = SOURCES.parents[1] / "docs" / "examples" / "LedgerNotifications.java"
"""What the documents offer to Java programs. Our program uses it as they would."""
COMPILE_TIMEOUT_S = 120.0
JAR = "program.jar"

HOW_TO_INSTALL = (
    f"no Java compiler found: install a JDK, {OLDEST_MAJOR} or later (apt install "
    "openjdk-17-jdk-headless, dnf install java-17-openjdk-devel, brew install openjdk@17), "
    "or set JAVA_HOME to one"
)


def compiled_classes(version: str, java: Java) -> Path:
    """Return the jar of the program. BookKeeper's jars must exist (``jars.fetch``).

    Raises SettingsError without a Java compiler, BookmenderError when the sources do not compile.
    """
    folder = jars.jars_folder(version).parent.parent / "java" / f"{version}-{_sources_hash()}-jar"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="compile-", dir=folder.parent) as workplace:
            classes = Path(workplace) / "classes"
            _compile(classes, version, find_compiler(java))
            # A jar, because a JVM shares no class data if its class path has a folder.
            whole = Path(workplace) / "whole"
            whole.mkdir()
            shutil.make_archive(str(whole / JAR), "zip", classes)
            (whole / f"{JAR}.zip").rename(whole / JAR)
            _publish(whole, folder)
    return folder / JAR


def _sources() -> list[Path]:
    return [*sorted(SOURCES.glob("*.java")), NOTIFICATIONS]


def _sources_hash() -> str:
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(f"{source.name}\n".encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler(java: Java) -> Path:
    """Return the compiler beside the Java that runs the program, or else the one on the PATH."""
    beside = java.executable.resolve().with_name("javac")
    found = beside if beside.exists() else shutil.which("javac")
    if found is None:
        raise SettingsError(HOW_TO_INSTALL)
    return Path(found)


def _compile(classes: Path, version: str, compiler: Path) -> None:
    command = [
        *(str(compiler), "--release", str(OLDEST_MAJOR), "-proc:none", "-nowarn"),
        *("-cp", jars.bookkeeper_classpath(version), "-d", str(classes)),
        *map(str, _sources()),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise BookmenderError(f"the Java program does not compile:\n{done.stderr}", version=version)


def _publish(classes: Path, folder: Path) -> None:
    """Move the classes into place, completely or not at all.

    If another process was quicker, its result is as good.
    """
    try:
        classes.rename(folder)
    except OSError:
        if not folder.exists():
            raise
