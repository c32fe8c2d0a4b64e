"""Evidence from pytest: which tests claim what, and, unless they are only looked for, how they
ended."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.compat.evidence import Witness, read_evidence

ROOT = Path(__file__).parent.parent.parent
TESTS_FAILED = 1
"""Pytest's exit code where some did, and nothing else went wrong."""


class GatheringError(Exception):
    """Pytest could not do it: a module that is not imported would lack its tests."""


def gather(*options: str) -> list[Witness]:
    """The marked tests, run by a pytest of their own with these options; it prints to our
    stderr."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "evidence.json"
        command = f"-m pytest -q -m compat -p no:cacheprovider -p {__package__}.plugin".split()
        done = subprocess.run(
            [sys.executable, *command, "--compat-evidence", str(path), *options],
            cwd=ROOT,
            check=False,
            stdout=sys.stderr,
        )
        if done.returncode not in (0, TESTS_FAILED):
            raise GatheringError(f"pytest ended with exit code {done.returncode}")
        return read_evidence(path)


def look() -> list[Witness]:
    """Without running the tests: in the seconds that it takes to find them."""
    return gather("--collect-only")
