"""The record of all runs: one JSON line per run, written at its end, so that an interrupted bench
keeps its runs."""

import enum
from collections.abc import Collection, Hashable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from bench.loss import Measure
from bench.writer import Disturbance


class Pass(enum.Enum):
    """The two passes: rates are measured alone. Beside a writer, the bench measures how much the
    writer suffers and how fast the repair is then."""

    ALONE = "alone"
    BESIDE_WRITER = "beside-writer"


class Key(NamedTuple):
    """The key of one run of the plan. ``repeat`` counts from 1."""

    of_pass: Pass
    load: str
    contender: str
    repeat: int


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One loss and its repair. ``judged_copies``: the number of copies that BookKeeper's own client
    read afterwards, all of them good."""

    of_pass: Pass
    load: str
    contender: str
    repeat: int
    judged_copies: int
    measure: Measure
    writer: Disturbance | None = None

    @property
    def key(self) -> Key:
        return Key(self.of_pass, self.load, self.contender, self.repeat)


class Keyed(Protocol):
    """A record with a key: a msgspec struct."""

    @property
    def key(self) -> Hashable: ...


R = TypeVar("R", bound=Keyed)


class RunFile(Generic[R]):
    """Runs by key. The last run of a key counts."""

    def __init__(self, path: Path, kind: Any) -> None:
        """Read the runs that ``path`` already contains. ``kind``: their class, or several (a
        union)."""
        self._path = path
        decoder = msgspec.json.Decoder(kind)
        lines = path.read_bytes().splitlines() if path.exists() else []
        self._runs: dict[Hashable, R] = {run.key: run for run in map(decoder.decode, lines)}

    def __iter__(self) -> Iterator[R]:
        return iter(self._runs.values())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._runs

    def add(self, run: R) -> None:
        self._runs[run.key] = run
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(run) + b"\n")

    def forget(self, keys: Collection[Hashable]) -> None:
        """Delete these runs, also from the file."""
        self._runs = {key: run for key, run in self._runs.items() if key not in keys}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_bytes(b"".join(msgspec.json.encode(run) + b"\n" for run in self))
