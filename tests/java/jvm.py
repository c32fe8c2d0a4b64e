"""The process of the Java program: commands in, records out.

The process ends when its stdin does, so it does not outlive ours.
"""

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from daemon.local import jars
from daemon.local.java import Java
from daemon.local.servers import NETTY_PROPERTIES
from ledgers.errors import SettingsError, UnavailableError
from tests.java import messages
from tests.java.build import SOURCES, compiled_classes
from tests.java.messages import AnyRecord

MAIN_CLASS = "bookmender.Main"
HEAP_MIB, DIRECT_MIB = 256, 256
SILENCE_TIMEOUT_S = 60.0
"""Time that the program may print nothing while it runs a command."""
END_TIMEOUT_S, RECORD_TIMEOUT_S = 10.0, 60.0
CALLED_WRONGLY = 2


class Jvm:
    """One process, of one BookKeeper version. Its standard error is ours."""

    def __init__(
        self,
        version: str,
        *,
        more_jars: str = "",
        properties: Mapping[str, str] | None = None,
        may_record: bool = False,
    ) -> None:
        """Download jars and compile the program if needed.

        ``more_jars``: a class path that follows BookKeeper's own. ``properties``: more of the
        JVM's. ``may_record``: if there is no class archive yet, record one when the process ends.
        Raises SettingsError without a JDK, UnavailableError if the jars cannot be downloaded.
        """
        java = Java.find()
        jars.fetch(version)
        self._temporary = tempfile.TemporaryDirectory(prefix="bookmender-java-")
        temporary = Path(self._temporary.name)
        self._archive = class_archive(version, java)
        self._archive_draft = temporary / "classes.jsa"
        draft = self._archive_draft if may_record else None
        shared = jars.archive_flags(self._archive, draft=draft)
        self._end_timeout_s = RECORD_TIMEOUT_S if str(draft) in "".join(shared) else END_TIMEOUT_S
        command = java_command(
            version,
            java,
            temporary=temporary,
            flags=shared,
            more_jars=more_jars,
            properties=properties,
        )
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._records: SimpleQueue[AnyRecord | None] = SimpleQueue()
        # On a thread, so that the program never waits for us to listen. It ends with the pipe.
        self._listener = threading.Thread(target=self._listen, name="java-listener", daemon=True)
        self._listener.start()

    def send(self, command: str, uri: str, options: Mapping[str, object]) -> None:
        line = msgspec.json.encode([command, uri, options]) + b"\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError as error:
            raise UnavailableError("the Java program has ended", command=command) from error

    def send_line(self) -> None:
        """Send an empty line. Some commands continue at each."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def answer(self) -> Iterator[AnyRecord]:
        """Yield records until the command ends.

        Raises UnavailableError if the command failed, or the program ended or printed nothing in
        time; SettingsError for wrong usage.
        """
        failure: messages.Failure | None = None
        while not isinstance(record := self._next(), messages.End):
            if isinstance(record, messages.Failure):
                failure = record
            else:
                yield record
        if failure is not None:
            kind = SettingsError if record.exit == CALLED_WRONGLY else UnavailableError
            raise kind(f"the Java client failed: {failure.error}")

    def arrived(self) -> Iterator[AnyRecord]:
        """Yield the records that have arrived, without waiting for more.

        Raises UnavailableError if the program has ended.
        """
        while not self._records.empty():
            yield self._next()
        if self._process.poll() is not None:
            raise UnavailableError("the Java program has ended", exit_code=self._process.poll())

    def end_input(self) -> None:
        """Send no more commands. The process ends after those it has."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process (SIGKILL)."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Freeze the process (SIGSTOP)."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def leftovers(self) -> Iterator[AnyRecord]:
        """Yield the records that are left after the process has ended."""
        while (record := self._records.get(timeout=END_TIMEOUT_S)) is not None:
            yield record

    def close(self) -> None:
        """End the process. May be called any number of times."""
        self.end_input()
        try:
            self._process.wait(self._end_timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._listener.join()
        if self._process.returncode == 0:
            jars.keep_archive(self._archive_draft, self._archive)
        self._temporary.cleanup()

    def _next(self) -> AnyRecord:
        try:
            record = self._records.get(timeout=SILENCE_TIMEOUT_S)
        except Empty:
            raise UnavailableError("the Java program says nothing") from None
        if record is None:
            raise UnavailableError(
                "the Java program has ended", exit_code=self._process.wait(END_TIMEOUT_S)
            )
        return record

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                self._records.put(messages.decode(line))
        self._records.put(None)


def class_archive(version: str, java: Java) -> Path:
    """Return the path of the program's class archive; see ``daemon.local.jars``."""
    return compiled_classes(version, java).with_name(f"java-{java.version}.jsa")


def java_command(
    version: str,
    java: Java,
    *,
    temporary: Path,
    flags: Sequence[str] = (),
    program: Sequence[str] = (MAIN_CLASS,),
    more_jars: str = "",
    properties: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the command. ``program``: the main class and its arguments."""
    classes = compiled_classes(version, java)
    return java.command(
        program,
        classpath=os.pathsep.join(
            filter(None, (str(classes), jars.bookkeeper_classpath(version), more_jars))
        ),
        heap_mib=HEAP_MIB,
        direct_mib=DIRECT_MIB,
        temporary=temporary,
        properties={
            **NETTY_PROPERTIES,
            "log4j2.configurationFile": str(SOURCES / "log4j2.properties"),
            **(properties or {}),
        },
        flags=flags,
    )
