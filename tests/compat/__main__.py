"""``make compat``: run the tests that show compatibility, and write the report, and the page."""

import argparse
import sys
from pathlib import Path

from tests.compat.catalogue import load_catalogue
from tests.compat.document import faults, page, report
from tests.compat.evidence import read_evidence
from tests.compat.gathering import ROOT, GatheringError, gather, look

PAGE = ROOT / "docs" / "compatibility.md"
REPORT = ROOT / "build" / "compatibility.md"


def main() -> None:
    """Run the command. Unknown options go to pytest."""
    parser = argparse.ArgumentParser(prog="make compat", description=__doc__)
    parser.add_argument("--evidence", type=Path, help="of a run, instead of running the tests now")
    parser.add_argument("--draft", action="store_true", help="write without running them")
    options, for_pytest = parser.parse_known_args()
    try:
        if options.evidence is not None:
            witnesses = read_evidence(options.evidence)
        else:
            witnesses = look() if options.draft else gather(*for_pytest)
    except GatheringError as error:
        sys.exit(f"compat: {error}")

    rows = load_catalogue()
    lacking = faults(rows, witnesses, has_run=not options.draft)
    if options.draft or not lacking:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(report(rows, witnesses))
        PAGE.write_text(page(rows, witnesses))
    for fault in lacking:
        print(fault, file=sys.stderr)
    print(f"{len(rows)} rows, {len(lacking)} faults")
    sys.exit(1 if lacking else 0)


if __name__ == "__main__":
    main()
