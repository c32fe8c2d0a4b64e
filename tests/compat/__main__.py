"""``make compat``: runs the tests that show compatibility, and writes docs/compatibility.md."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.compat.catalogue import load_catalogue
from tests.compat.document import faults, page
from tests.compat.evidence import Witness, read_evidence

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
TESTS_FAILED = 1
"""Pytest's exit code where some did, and nothing else went wrong."""


def main() -> None:
    """Options that are not ours go to pytest."""
    parser = argparse.ArgumentParser(prog="make compat", description=__doc__)
    parser.add_argument("--evidence", type=Path, help="of a run, instead of running the tests now")
    parser.add_argument("--draft", action="store_true", help="write the page, whatever is lacking")
    options, for_pytest = parser.parse_known_args()
    if options.evidence is not None:
        witnesses = read_evidence(options.evidence)
    else:
        witnesses = gather(*(["--collect-only"] if options.draft else []), *for_pytest)
    rows = load_catalogue()
    lacking = faults(rows, witnesses, has_run=not options.draft)
    if options.draft or not lacking:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(rows, witnesses))
    for fault in lacking:
        print(fault, file=sys.stderr)
    print(f"{len(rows)} rows, {len(lacking)} faults")
    sys.exit(1 if lacking else 0)


def gather(*options: str) -> list[Witness]:
    """Let pytest find, and unless told otherwise run, the tests that are marked.

    Raises SystemExit when it cannot: a module that is not imported would lack its tests.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "evidence.json"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-m", "compat"),
            *("-p", "tests.compat.plugin", "--compat-evidence", str(path)),
            *options,
        ]
        done = subprocess.run(command, cwd=ROOT, check=False, stdout=sys.stderr)
        if done.returncode not in (0, TESTS_FAILED):
            sys.exit(f"pytest could not do it: exit code {done.returncode}")
        return read_evidence(path)


if __name__ == "__main__":
    main()
