"""The rows: Java's tests of a part of AutoRecovery, and gaps that were found by reading its code.

In the TOML file of a part, each table is one Java test class, or ``Gaps``. Each key is one test or
gap, with its content. ``bookie = true`` means that only a real bookie can show it.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

PARTS_FOLDER = Path(__file__).parent
GAPS = "Gaps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One of Java's tests, ``Class.test``, or a gap, ``G8``."""

    part: str
    group: str
    """Java's test class, or GAPS."""
    title: str
    """The name within its group."""
    about: str
    needs_bookie: bool
    """Fakes prove nothing here: at least one of the row's tests must run on real bookies."""

    @property
    def name(self) -> str:
        """Return the name as tests use it."""
        return self.title if self.group == GAPS else f"{self.group}.{self.title}"


def load_catalogue(folder: Path = PARTS_FOLDER) -> tuple[Row, ...]:
    """Return the rows of every part, in the order of the files."""
    return tuple(row for path in sorted(folder.glob("*.toml")) for row in _part(path))


def _part(path: Path) -> list[Row]:
    groups = tomllib.loads(path.read_text())
    return [
        Row(
            part=path.stem,
            group=group,
            title=title,
            about=fields["about"],
            needs_bookie=fields.get("bookie", False),
        )
        for group, rows in groups.items()
        for title, fields in rows.items()
    ]
