"""The Java program's process: commands in, records out.

It ends when its stdin does, so it does not outlive this process.
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
from daemon.local import jars as archive
from daemon.local.bookie import NETTY_PROPERTIES
from daemon.local.java import Java
from ledgers.errors import SettingsError, UnavailableError
from tests.java import messages
from tests.java.build import SOURCES, compiled_classes
from tests.java.messages import AnyRecord

MAIN_CLASS = "bookmender.Main"
HEAP_MIB, DIRECT_MIB = 256, 256
SILENCE_TIMEOUT_S = 60.0
"""How long it may print nothing while it runs a command."""
END_TIMEOUT_S, RECORD_TIMEOUT_S = 10.0, 60.0
CALLED_WRONGLY = 2


class Jvm:
    """One process, of one BookKeeper version. Its standard error is ours."""

    def __init__(self, version: str, *, may_record: bool = False) -> None:
        """Fetch jars and compile the program if need be. ``may_record``: where there is no archive
        of its classes yet, record one when it ends.

        Raises SettingsError without a JDK, UnavailableError when the jars cannot be fetched.
        """
        java = Java.find()
        jars.fetch(version, java)
        self._temporary = tempfile.TemporaryDirectory(prefix="bookmender-java-")
        temporary = Path(self._temporary.name)
        self._archive = class_archive(version, java)
        self._archive_draft = temporary / "classes.jsa"
        draft = self._archive_draft if may_record else None
        shared = archive.flags(self._archive, draft=draft)
        self._end_timeout_s = RECORD_TIMEOUT_S if str(draft) in "".join(shared) else END_TIMEOUT_S
        command = java_command(version, java, temporary=temporary, flags=shared)
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
        """An empty one, to a command that goes on at each."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def answer(self) -> Iterator[AnyRecord]:
        """What it prints until the command's end.

        Raises UnavailableError when the command failed, and when the program ended or went silent;
        SettingsError when it was called wrongly.
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

    def end_input(self) -> None:
        """No more commands: it ends when it is through with those it has."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """As a crash would (SIGKILL)."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Freeze it (SIGSTOP)."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def leftovers(self) -> Iterator[AnyRecord]:
        """What it still had printed, once it has ended."""
        while (record := self._records.get(timeout=END_TIMEOUT_S)) is not None:
            yield record

    def close(self) -> None:
        """End the process. Any number of times."""
        self.end_input()
        try:
            self._process.wait(self._end_timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._listener.join()
        if self._process.returncode == 0:
            archive.keep(self._archive_draft, self._archive)
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
    """Where the program's classes are kept ready to be mapped; see ``daemon.local.jars``."""
    return compiled_classes(version, java).with_name(f"java-{java.version}.jsa")


def java_command(
    version: str, java: Java, *, temporary: Path, flags: Sequence[str] = ()
) -> list[str]:
    program = compiled_classes(version, java)
    return java.command(
        [MAIN_CLASS],
        classpath=os.pathsep.join([str(program), jars.bookkeeper_classpath(version)]),
        heap_mib=HEAP_MIB,
        direct_mib=DIRECT_MIB,
        temporary=temporary,
        properties={
            **NETTY_PROPERTIES,
            "log4j2.configurationFile": str(SOURCES / "log4j2.properties"),
        },
        flags=flags,
    )
