"""Finds the Java for the servers, and gives the flags that keep JVMs small and quick to start."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ledgers.errors import SettingsError

OLDEST_MAJOR = 17
"""The class files of BookKeeper 4.18 require this release."""
VERSION_TIMEOUT_S = 20.0

OPTION_VARIABLES = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")
"""Environment variables from which each JVM also reads options."""

HOW_TO_INSTALL = (
    f"install Java {OLDEST_MAJOR} or later "
    "(apt install openjdk-17-jre-headless, dnf install java-17-openjdk-headless, "
    "brew install openjdk@17) or set JAVA_HOME"
)

SMALL_AND_QUICK = (
    "-XX:+UseSerialGC",  # one thread, least memory beside the heap
    "-XX:TieredStopAtLevel=1",  # the quick compiler only: half the start time, less code cache
    "-XX:ReservedCodeCacheSize=48m",
    "-XX:MaxMetaspaceSize=96m",
    "-Xss512k",
    "-XX:-UsePerfData",  # writes no files to the system's temporary folder
    "-XX:+ExitOnOutOfMemoryError",
    "-Xshare:auto",
    "-Djava.net.preferIPv4Stack=true",
    "-Djava.awt.headless=true",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Java:
    """A Java found on this machine. ``major``: 17, 21 …; ``version``: in full, such as 17.0.15."""

    executable: Path
    major: int
    version: str = ""

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> "Java":
        """Return the Java of JAVA_HOME if that is set, else of the PATH. Raises SettingsError if
        there is no usable Java."""
        if home := environment.get("JAVA_HOME"):
            found: str | None = f"{home}/bin/java"
            if not os.path.exists(f"{home}/bin/java"):  # JAVA_HOME names one, so no other is used
                raise SettingsError(
                    f"JAVA_HOME is {home}, which has no bin/java: set it to the folder of a Java "
                    f"{OLDEST_MAJOR} or later, or unset it to use the Java on the PATH"
                )
        else:
            found = shutil.which("java", path=environment.get("PATH", os.defpath))
        if found is None:
            raise SettingsError(f"no Java found: {HOW_TO_INSTALL}")
        version = ""
        with suppress(OSError, subprocess.SubprocessError):
            # macOS has a ``java`` that only says where to download one.
            answer = subprocess.run(
                [found, "-version"],
                capture_output=True,
                text=True,
                timeout=VERSION_TIMEOUT_S,
                env=dict(environment),
                check=True,
            )
            said = re.search(r'version "([^"]+)"', answer.stderr)
            version = said[1] if said else ""
        number = re.match(r"(?:1\.)?(\d+)", version)  # Java 8 called itself 1.8
        if not version and (names := [name for name in OPTION_VARIABLES if environment.get(name)]):
            raise SettingsError(
                f"{found} -version fails, perhaps because of {' and '.join(names)}: unset or "
                f"correct it; otherwise {HOW_TO_INSTALL}"
            )
        if number is None or int(number[1]) < OLDEST_MAJOR:
            raise SettingsError(
                f"{found} is Java {version or 'of no known version'}: {HOW_TO_INSTALL}"
            )
        return cls(executable=Path(found), major=int(number[1]), version=version)

    def command(
        self,
        main: Sequence[str],
        *,
        classpath: str,
        heap_mib: int,
        direct_mib: int,
        temporary: Path,
        properties: Mapping[str, str],
        flags: Sequence[str] = (),
    ) -> list[str]:
        """Return a command line. ``main``: the class and its arguments.

        ``direct_mib`` limits the memory outside the heap that Netty uses. ``temporary``: where
        native libraries are unpacked; a killed JVM leaves them there. ``flags``: JVM flags that
        override the defaults of this module.
        """
        return [
            str(self.executable),
            f"-Xms{heap_mib // 4}m",
            f"-Xmx{heap_mib}m",
            f"-XX:MaxDirectMemorySize={direct_mib}m",
            *SMALL_AND_QUICK,
            *flags,
            *(["--enable-native-access=ALL-UNNAMED"] if self.major >= 22 else []),
            f"-Djava.io.tmpdir={temporary}",
            *(f"-D{name}={value}" for name, value in properties.items()),
            "-cp",
            classpath,
            *main,
        ]
