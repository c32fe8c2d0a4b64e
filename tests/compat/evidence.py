"""The markers and outcomes of tests, written by one process and read by another."""

from pathlib import Path
from typing import Literal

import msgspec

Verdict = Literal["same", "better", "other"]
"""Bookmender does the same as Java, does better, or differs on purpose."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """``@pytest.mark.compat("Class.test", …, verdict=…, why=…)``: the claim of a test.

    ``why`` may be left out if the behaviour is the same, or another test of the row has it.
    """

    rows: tuple[str, ...]
    verdict: Verdict
    why: str = ""


class Witness(msgspec.Struct, frozen=True, kw_only=True):
    """One test, with one set of its parameters."""

    file: str
    """The path from the root of the repository."""
    test: str
    """The function's name."""
    parameters: str = ""
    is_on_bookies: bool
    """True if the test runs on real bookies or a real ZooKeeper: the marker ``cluster``."""
    claims: tuple[Claim, ...]
    outcome: str | None = None
    """``passed``, ``failed`` or ``skipped``; None if the test was only collected."""

    @property
    def full_name(self) -> str:
        return f"{self.file}::{self.test}" + (f"[{self.parameters}]" if self.parameters else "")


def write_evidence(path: Path, witnesses: list[Witness]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(witnesses)))


def read_evidence(path: Path) -> list[Witness]:
    """Return the evidence. Raise msgspec.ValidationError for a malformed marker."""
    return msgspec.json.decode(path.read_bytes(), type=list[Witness])
