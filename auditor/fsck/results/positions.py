"""How far the results in a folder follow the change feed: ``state/clients.json``.

A run that follows the feed reads and writes this file, which tells what it need not check again.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from auditor.fsck.options import Level
from auditor.fsck.results.files import replace_file

CLIENTS_FILE = "clients.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPosition:
    """How far the results in this folder follow a client of the feed.

    ``position``: the id of a checkpoint. Every change up to it was checked at ``level``, or the
    client is told of a later change of the same ledger. ``generation``: of the feed. ``log``: the
    ledger of the log that has the checkpoint; None: not known, or an earlier release wrote it.
    """

    level: Level
    generation: int
    position: int
    log: tuple[int, int, int] | None = None


def read_positions(folder: Path) -> dict[str, ClientPosition]:
    """Return the positions from the ``state`` folder, by client. Empty if the file is unreadable:
    then a run checks all ledgers."""
    try:
        stored = json.loads((folder / CLIENTS_FILE).read_bytes())
        return {
            name: ClientPosition(
                level=Level(each["level"]),
                generation=each["generation"],
                position=each["position"],
                log=tuple(each["log"]) if each.get("log") else None,
            )
            for name, each in stored.items()
        }
    except (FileNotFoundError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return {}


def keep_position(folder: Path, client: str, position: ClientPosition) -> None:
    """Store the position of one client."""
    write_positions(folder, {**read_positions(folder), client: position})


def write_positions(folder: Path, positions: Mapping[str, ClientPosition]) -> None:
    stored = {name: {**asdict(each), "level": each.level.value} for name, each in positions.items()}
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / CLIENTS_FILE, json.dumps(stored, indent=2) + "\n")
