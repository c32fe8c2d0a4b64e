"""What the markers of tests say, and how the tests ended: written by one process, read by
another."""

from pathlib import Path
from typing import Literal

import msgspec

Verdict = Literal["same", "better", "other"]
"""Ours does as Java does; does better; or does otherwise on purpose."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """``@pytest.mark.compat("Class.test", …, verdict=…, why=…)``: what its test shows of these
    rows.

    ``why`` may be left out where ours does the same, and where another test of the row says it.
    """

    rows: tuple[str, ...]
    verdict: Verdict
    why: str = ""


class Witness(msgspec.Struct, frozen=True, kw_only=True):
    """One test, with one set of its parameters."""

    file: str
    """From the root of the repository."""
    test: str
    """The function's name."""
    parameters: str = ""
    is_on_bookies: bool
    """Whether it runs on real bookies, or a real ZooKeeper: the marker ``cluster``."""
    claims: tuple[Claim, ...]
    outcome: str | None = None
    """``passed``, ``failed`` or ``skipped``; None when it was only looked at."""

    @property
    def full_name(self) -> str:
        return f"{self.file}::{self.test}" + (f"[{self.parameters}]" if self.parameters else "")


def write_evidence(path: Path, witnesses: list[Witness]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(witnesses)))


def read_evidence(path: Path) -> list[Witness]:
    """Raises msgspec.ValidationError where a marker says what no marker may say."""
    return msgspec.json.decode(path.read_bytes(), type=list[Witness])
