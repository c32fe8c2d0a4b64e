"""The records of all benches: one JSON line each, written at once, so that an interrupted bench
keeps what it has measured."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path

import msgspec

FAILURE = "failure"
"""The name of a record about something that failed. Its ``text`` says why."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. ``name``: its kind. ``labels``: what was measured; the last record with the
    same name and labels counts. ``values``: the figures by name, without those that were not
    measured. ``text``: for people."""

    name: str
    labels: Mapping[str, str | int] = {}
    values: Mapping[str, float] = {}
    text: str = ""

    @property
    def key(self) -> Hashable:
        return self.name, frozenset(self.labels.items())


class Records:
    """The records of one file, in the order in which they were first written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_bytes().splitlines() if path.exists() else []
        found = (msgspec.json.decode(line, type=Record) for line in lines)
        self._records = {record.key: record for record in found}

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def __contains__(self, record: Record) -> bool:
        return record.key in self._records

    def find(self, name: str, **labels: str | int) -> list[Record]:
        """Return the records with this name and these labels, whatever their other labels are."""
        return [
            record
            for record in self
            if record.name == name and labels.items() <= record.labels.items()
        ]

    def labels(self, name: str, label: str) -> list[str | int]:
        """Return the different values of a label, in the order of the records."""
        return list(dict.fromkeys(record.labels[label] for record in self.find(name)))

    def add(self, record: Record) -> None:
        self._records.pop(record.key, None)
        self._records[record.key] = record
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")

    def forget(self, is_meant: Callable[[Record], bool]) -> None:
        """Delete these records, also from the file."""
        self._records = {key: each for key, each in self._records.items() if not is_meant(each)}
        self._path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in self))
