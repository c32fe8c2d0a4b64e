"""Evidence from pytest: the claims of tests, and their outcomes unless they are only collected."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.compat.evidence import Witness, read_evidence

ROOT = Path(__file__).parent.parent.parent
TESTS_FAILED = 1
"""The exit code of pytest if some tests failed, and nothing else went wrong."""


class GatheringError(Exception):
    """Pytest failed: the tests of a module that cannot be imported would be missing."""


def gather(*options: str) -> list[Witness]:
    """Run the marked tests in a pytest of their own with these options, and return the evidence.

    Its output goes to our stderr.
    """
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
    """Collect the tests without running them, which takes seconds."""
    return gather("--collect-only")
