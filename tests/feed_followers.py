"""The followers of ``make feed-demo``: programs that are killed, and the catalogues they keep."""

from __future__ import annotations

import json
import os
import shlex
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints.client import IN_ZOOKEEPER
from checkpoints.collector import fingerprint_of
from daemon.cli.main import EXIT_FAILED, EXIT_FENCED
from daemon.local.processes import Child
from ledgers.manager import LedgerManager
from tests.demo import SurpriseError
from tests.forked import ForkedChild

SHOWN_MAX = 5


class Known(NamedTuple):
    """What a catalogue knows of a ledger that exists. None: this follower does not store it."""

    version: int | None = None
    fingerprint: str | None = None
    state: str | None = None

    def agrees(self, other: Known) -> bool:
        pairs = zip(self, other, strict=True)
        return all(a == b for a, b in pairs if a is not None and b is not None)

    def __str__(self) -> str:
        version = None if self.version is None else f"{self.version:#x}"
        told = zip(("version", "fingerprint", "state"), (version, *self[1:]), strict=True)
        return ", ".join(f"{name} {value}" for name, value in told if value is not None)


Catalogue = Mapping[int, Known]
"""All ledgers that exist, by id."""


async def read_zookeeper(manager: LedgerManager) -> Catalogue:
    """Return what ZooKeeper has. May raise UnavailableError."""
    found: dict[int, Known] = {}
    async for ledger_ids in manager.ledger_ids():
        for ledger_id in ledger_ids:
            read = await manager.find(ledger_id)
            if read is not None:
                found[ledger_id] = Known(
                    version=read.stat.mzxid,
                    fingerprint=f"{fingerprint_of(read.data):016x}",
                    state=read.metadata.state.name,
                )
    return found


def differing(catalogue: Catalogue, wanted: Catalogue) -> list[int]:
    """Return the ledgers that the catalogue lacks, has too many, or knows otherwise."""
    return sorted(
        ledger_id
        for ledger_id in catalogue.keys() | wanted.keys()
        if (known := catalogue.get(ledger_id)) is None
        or (there := wanted.get(ledger_id)) is None
        or not known.agrees(there)
    )


def difference_text(ledger_id: int, catalogue: Catalogue, wanted: Catalogue) -> str:
    known, there = catalogue.get(ledger_id), wanted.get(ledger_id)
    return f"ledger {ledger_id}: {known or 'no ledger'}; in ZooKeeper {there or 'no ledger'}"


@dataclass(slots=True)
class Follower:
    """A program that follows the feed. ``name``: also that of the client. ``what``: as it is shown
    to a user. ``store``: the URL of its receipts.

    ``read``: its catalogue, and the number of changes that it was told.
    """

    name: str
    what: str
    command: tuple[str, ...]
    store: str
    folder: Path
    environment: Mapping[str, str]
    read: Callable[[], tuple[Catalogue, int]]
    has_versions: bool = True
    """A later version wins, so that a fenced process cannot put an earlier one in its place."""
    kill_count: int = 0
    fenced: list[Child] = field(default_factory=list)
    """Processes that ended because another one had opened the client after them."""
    _running: list[Child] = field(default_factory=list)
    """One process; for a while two."""

    def start(self) -> None:
        log = self.folder / f"{self.name}.log"
        child = ForkedChild(self.name, self.command, log=log, environment=self.environment)
        self._running.append(child)

    def pause(self) -> None:
        self._running[0].pause()

    def kill(self) -> None:
        """Kill the process as ``kill -9`` does."""
        self._running.pop().kill()
        self.kill_count += 1

    def resume(self) -> None:
        self._running[0].resume()

    def has_fenced(self) -> bool:
        """Return True if one of two processes has ended.

        It need not be the first one. If it was frozen before it opened the client, or lost its
        session, it opens the client after the second one.
        """
        for child in self._running:
            if not child.is_running:
                # The programs in Python do not catch ClientFencedError, so they end with 1.
                if child.exit_code not in (EXIT_FAILED, EXIT_FENCED):
                    raise SurpriseError(f"a fenced {self.name} ended with {child.exit_code}")
                self.fenced.append(child)
                self._running.remove(child)
                return True
        return False

    def stop(self) -> None:
        for each in self._running:
            each.kill()

    def require_running(self) -> None:
        """Raise SurpriseError if the program ended by itself."""
        if not all(each.is_running for each in self._running):
            raise SurpriseError(f"{self.name} has ended by itself, see {self.name}.log")


def followers(uri: str, folder: Path, *, postgresql: str | None) -> list[Follower]:
    """Return all followers, not started. ``postgresql``: the URL of an empty database."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("BOOKMENDER_")}
    environment = ours | {"BOOKMENDER_METADATA_SERVICE_URI": uri}
    printed, ran, example = folder / "print.log", folder / "exec.txt", folder / "example.db"
    by_exec = f"sqlite:///{folder / 'exec.db'}"
    made = [
        Follower(
            name="print",
            what="feed follow -o json, receipts in ZooKeeper",
            command=("daemon", "feed", "follow", "--client", "print", "--from-start", "-o", "json"),
            store=IN_ZOOKEEPER,
            folder=folder,
            environment=environment,
            read=lambda: read_printed(printed),
            has_versions=False,
        ),
        Follower(
            name="exec",
            what="feed follow --exec, receipts in SQLite",
            command=(
                *("daemon", "feed", "follow", "--client", "exec", "--from-start"),
                *("--store", by_exec, "--exec", _exec_command(ran, failing_file(folder))),
            ),
            store=by_exec,
            folder=folder,
            environment=environment,
            read=lambda: read_ran(ran),
        ),
        Follower(
            name="catalogue",
            what="docs/examples/catalogue.py, receipts in SQLite",
            command=("docs.examples.catalogue", uri, str(example)),
            store=f"sqlite:///{example}",
            folder=folder,
            environment=environment,
            read=lambda: read_example(example),
            has_versions=False,
        ),
    ]
    stores = {"zookeeper": IN_ZOOKEEPER, "sqlite": f"sqlite:///{folder / 'sqlite.db'}"}
    if postgresql is not None:
        stores["postgresql"] = postgresql
    return made + [_in_python(name, uri, url, folder, environment) for name, url in stores.items()]


def failing_file(folder: Path) -> Path:
    """Return the file that makes the command of ``--exec`` fail for some ledgers while it
    exists."""
    return folder / "failing"


def _exec_command(ran: Path, failing: Path) -> str:
    fails = f"[ $((LEDGER_ID % 10)) = 3 ] && [ -e {shlex.quote(str(failing))} ]"
    return (
        f"if {fails}; then echo not today >&2; exit 1; fi; "
        f'echo "$LEDGER_ID $LEDGER_DELETED $LEDGER_VERSION" >>{shlex.quote(str(ran))}'
    )


def _in_python(
    name: str, uri: str, store: str, folder: Path, environment: Mapping[str, str]
) -> Follower:
    file = folder / f"told-{name}.db"
    return Follower(
        name=name,
        what=f"a catalogue in Python, receipts in {name}",
        command=("tests.feed_catalogue", uri, name, store, str(file)),
        store=store,
        folder=folder,
        environment=environment,
        read=lambda: read_told(file),
    )


# --- Catalogues -----------------------------------------------------------------------------------


def read_printed(file: Path) -> tuple[Catalogue, int]:
    """Read the lines of ``feed follow -o json``, which are in order. Other lines are messages.

    Asserts that the versions of a ledger never descend.
    """
    versions: dict[int, tuple[int, bool]] = {}
    told_count = 0
    for line in _whole_lines(file):
        if not line.startswith('{"ledger_id"'):
            continue
        told = json.loads(line)
        told_count += 1
        before, _ = versions.get(told["ledger_id"], (0, False))
        assert before <= told["version"], f"the feed told {before:#x} before {line}"
        versions[told["ledger_id"]] = told["version"], told["is_deleted"]
    return _existing(versions), told_count


def read_ran(file: Path) -> tuple[Catalogue, int]:
    """Read the lines of the command of ``--exec``.

    A command may outlive its killed follower, so the lines of a ledger may be out of order. Its
    latest version counts.
    """
    versions: dict[int, tuple[int, bool]] = {}
    lines = [tuple(map(int, line.split())) for line in _whole_lines(file)]
    for ledger_id, is_deleted, version in lines:
        versions[ledger_id] = max(versions.get(ledger_id, (0, False)), (version, bool(is_deleted)))
    return _existing(versions), len(lines)


def _existing(versions: Mapping[int, tuple[int, bool]]) -> Catalogue:
    return {i: Known(version=v) for i, (v, is_deleted) in versions.items() if not is_deleted}


def read_example(file: Path) -> tuple[Catalogue, int]:
    """Read the table of the example, which does not count what it was told."""
    rows = _rows(file, "SELECT id, state FROM ledgers")
    return {ledger_id: Known(state=state) for ledger_id, state in rows}, 0


def read_told(file: Path) -> tuple[Catalogue, int]:
    """Read the table of ``tests.feed_catalogue``."""
    rows = _rows(file, "SELECT id, version, fingerprint, told_count FROM ledgers")
    told_count = sum(count for _, _, _, count in rows)
    existing = [row for row in rows if row[2] is not None]
    return {i: Known(version=v, fingerprint=f) for i, v, f, _ in existing}, told_count


def _whole_lines(file: Path) -> list[str]:
    """Return the lines of a file that is being written; an incomplete last one is left out."""
    if not file.exists():
        return []
    return file.read_text(errors="replace").split("\n")[:-1]


def _rows(file: Path, query: str) -> list[tuple[Any, ...]]:
    if not file.exists():
        return []
    with closing(sqlite3.connect(file)) as table:
        try:
            return table.execute(query).fetchall()
        except sqlite3.OperationalError:  # the program has not created the table yet
            return []
