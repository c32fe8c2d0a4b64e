"""The Java program as an object: BookKeeper's own client, asked one thing after another."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from daemon.local import jars
from ledgers.errors import UnavailableError
from tests.java import messages
from tests.java.jvm import Jvm
from tests.java.messages import AnyRecord, Expected, Record, Shape, Verdict

OnRecord = Callable[[AnyRecord], None]
R = TypeVar("R", bound=Record)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of ``judge``. Ledgers are in the order in which they were finished."""

    summary: messages.Summary
    ledgers: Mapping[int, messages.LedgerVerdict]
    comparisons: tuple[messages.Comparison, ...]

    @property
    def verdict(self) -> Verdict:
        return self.summary.verdict


class JavaTool:
    """BookKeeper's own client, of one version. A context manager; its JVM starts at the first call.

    Every call may raise UnavailableError: the client failed, or the program printed nothing in
    time.
    """

    def __init__(self, version: str = jars.BOOKKEEPER_DEFAULT, **jvm: Any) -> None:
        """``jvm``: more arguments of ``Jvm``."""
        self._version, self._jvm_options = version, jvm
        self._jvm: Jvm | None = None

    def judge(
        self,
        uri: str,
        ledger_ids: Iterable[int] | None = None,
        *,
        expected: Iterable[Expected] = (),
        read_timeout_s: int = 5,
        on_record: OnRecord = lambda record: None,
    ) -> Report:
        """Read every copy of these ledgers (None: of all). ``on_record`` gets each record."""
        options: dict[str, object] = {
            "expect": list(expected),
            "readTimeoutS": read_timeout_s,
        }
        if ledger_ids is not None:
            options["ledgers"] = list(ledger_ids)
        answer = self._ask("judge", uri, options, on_record)
        ledgers = _only(messages.LedgerVerdict, answer)
        return Report(
            summary=_only(messages.Summary, answer)[0],
            ledgers={ledger.ledger: ledger for ledger in ledgers},
            comparisons=tuple(_only(messages.Comparison, answer)),
        )

    def write(
        self, uri: str, *shapes: Shape, metadata_version: int = 3, with_ctime: bool = False
    ) -> list[Expected]:
        """Write ledgers, and return what readers must find in them, in the order of their ids."""
        options = {"shapes": shapes, "metadataVersion": metadata_version, "ctime": with_ctime}
        written = _only(messages.Written, self._ask("write", uri, options))
        found = [Expected(ledger=w.ledger, last=w.last, sha256=w.sha256) for w in written]
        return sorted(found, key=lambda each: each.ledger)

    def read(
        self, uri: str, ledger_id: int, *, with_recovery: bool = False, last: int | None = None
    ) -> messages.Content:
        """Read up to the last add confirmed, or to ``last``. An error is part of the answer."""
        options = {"ledgers": [ledger_id], "recover": with_recovery, "last": last}
        return _only(messages.Content, self._ask("read", uri, options))[0]

    def delete(self, uri: str, ledger_ids: Iterable[int]) -> None:
        self._ask("delete", uri, {"ledgers": list(ledger_ids)})

    def ledger_ids(self, uri: str) -> frozenset[int]:
        """Return the ids of all ledgers."""
        return frozenset(_only(messages.Listed, self._ask("list", uri))[0].ledgers)

    def metadata(self, uri: str, ledger_id: int) -> messages.Metadata:
        return _only(messages.Metadata, self._ask("metadata", uri, {"ledgers": [ledger_id]}))[0]

    def under_replicated(self, uri: str) -> list[messages.Mark]:
        return _only(messages.Mark, self._ask("under-replicated", uri))

    def is_replication_enabled(self, uri: str) -> bool:
        return _only(messages.QueueState, self._ask("under-replicated", uri))[0].enabled

    def auditor(self, uri: str) -> str | None:
        """Return the bookie id of the elected auditor."""
        return _only(messages.Auditor, self._ask("auditor", uri))[0].auditor

    def close(self) -> None:
        """End the JVM. May be called any number of times; a later call starts another."""
        if self._jvm is not None:
            self._jvm.close()
            self._jvm = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(
        self,
        command: str,
        uri: str,
        options: Mapping[str, object] | None = None,
        on_record: OnRecord = lambda record: None,
    ) -> list[AnyRecord]:
        if self._jvm is None:
            # An archive of other classes could not be used by the JVMs without them.
            self._jvm = Jvm(self._version, may_record=not self._jvm_options, **self._jvm_options)
        answer = []
        try:
            self._jvm.send(command, uri, options or {})
            for record in self._jvm.answer():
                on_record(record)
                answer.append(record)
        except BaseException:
            # Also after an interruption: the rest would look like the next answer.
            self.close()
            raise
        return answer


class LongCommand:
    """A command in a process of its own: a context manager that kills it at the end."""

    def __init__(
        self, command: str, uri: str, options: Mapping[str, object], *, version: str
    ) -> None:
        self._jvm = Jvm(version)
        self._jvm.send(command, uri, options)
        self._answer = self._jvm.answer()

    def close(self) -> None:
        """Kill the process if it still runs. May be called any number of times."""
        self._jvm.kill()
        self._jvm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class JavaWriter(LongCommand):
    """A Java client that adds to one ledger until it is stopped.

    ``window``: the most entries in flight; ``pause_ms``: between two entries;
    ``delays_ensemble_change``: keep a failed bookie as long as enough others acknowledge.
    """

    def __init__(
        self,
        uri: str,
        shape: Shape,
        *,
        version: str = jars.BOOKKEEPER_DEFAULT,
        window: int = 1,
        pause_ms: int = 1,
        delays_ensemble_change: bool = False,
    ) -> None:
        shape_options: dict[str, object] = msgspec.to_builtins(shape)
        options = shape_options | {
            "window": window,
            "pauseMs": pause_ms,
            "delayEnsembleChange": delays_ensemble_change,
        }
        super().__init__("write-forever", uri, options, version=version)
        self.ledger_id = self._next(messages.Created).ledger
        self.last_acknowledged = -1
        """The last entry of which we have read."""

    def wait_acknowledged(self, entry_id: int) -> None:
        """Return when the entry is acknowledged. Raise UnavailableError if the writer ended."""
        while self.last_acknowledged < entry_id:
            self.last_acknowledged = self._next(messages.Added).entry

    def pause(self) -> None:
        """Freeze the writer (SIGSTOP) until it is resumed."""
        self._jvm.pause()

    def resume(self) -> None:
        self._jvm.resume()

    def kill(self) -> int:
        """Kill the writer, and return the last entry that was acknowledged to it."""
        self._jvm.kill()
        for record in self._jvm.leftovers():
            if isinstance(record, messages.Added):
                self.last_acknowledged = record.entry
        self.close()
        return self.last_acknowledged

    def stop(self) -> messages.Stopped:
        """Let the writer close its ledger and end."""
        self._jvm.end_input()
        return self.wait_stopped()

    def wait_stopped(self) -> messages.Stopped:
        """Return when the writer ended, by ``stop`` or by an error, which is part of the answer."""
        for record in self._answer:
            if isinstance(record, messages.Added):
                self.last_acknowledged = record.entry
            elif isinstance(record, messages.Stopped):
                self._jvm.close()
                return record
        raise UnavailableError("the Java writer ended without a word")

    def _next(self, kind: type[R]) -> R:
        for record in self._answer:
            if isinstance(record, kind):
                return record
        raise UnavailableError("the Java writer has ended", expected=kind.__name__)


class JavaChanger(LongCommand):
    """A Java client that creates, writes, closes and deletes ledgers at random until ``stop``.

    ``threads``: steps at the same time; ``pause_ms``: mean pause of each between two steps;
    ``keep``: number of closed ledgers of each from which on it deletes some.
    """

    def __init__(
        self,
        uri: str,
        shape: Shape,
        *,
        threads: int,
        pause_ms: int,
        keep: int,
        version: str = jars.BOOKKEEPER_DEFAULT,
    ) -> None:
        shape_options: dict[str, object] = msgspec.to_builtins(shape)
        options = shape_options | {"threads": threads, "pauseMs": pause_ms, "keep": keep}
        super().__init__("change", uri, options, version=version)
        self.created: set[int] = set()
        self.deleted: set[int] = set()
        self.failures: list[messages.StepFailed] = []

    def read(self) -> None:
        """Note all steps that the program has told. Raises UnavailableError if it has ended."""
        for record in self._jvm.arrived():
            self._note(record)

    def stop(self) -> None:
        """Let the client close its ledgers, and return when it has ended."""
        self._jvm.end_input()
        for record in self._answer:
            self._note(record)
        self._jvm.close()

    def _note(self, record: AnyRecord) -> None:
        match record:
            case messages.Created():
                self.created.add(record.ledger)
            case messages.Deleted():
                self.deleted.add(record.ledger)
            case messages.StepFailed():
                self.failures.append(record)


class JavaReader(LongCommand):
    """A Java client that keeps ledgers open and reads them on request.

    Open ledgers are recovered first. ``handles``: ``following`` their metadata, ``plain``, or
    ``notified`` by the server with the URL ``notify_server``.
    """

    def __init__(
        self,
        uri: str,
        ledger_ids: Sequence[int],
        *,
        version: str = jars.BOOKKEEPER_DEFAULT,
        handles: str = "following",
        notify_server: str = "",
    ) -> None:
        options = {"handles": handles, "notifyServer": notify_server}
        super().__init__("follow", uri, {"ledgers": list(ledger_ids), **options}, version=version)
        self._ledger_ids = ledger_ids
        for ledger_id in ledger_ids:
            assert next(self._answer) == messages.Followed(ledger=ledger_id)

    def read(self) -> list[messages.Content]:
        """Return the content of the ledgers in this order. An error is part of the answer."""
        self._jvm.send_line()
        return _only(messages.Content, islice(self._answer, len(self._ledger_ids)))


def _only(kind: type[R], records: Iterable[AnyRecord]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]
