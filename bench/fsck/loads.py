"""The ledgers that are inspected: closed, with all entries on each of three bookies."""

from auditor.fsck.options import Level
from bench.inspect_bench import Load

ENDS, SAMPLE, FULL, METADATA = Level.ENDS, Level.SAMPLE, Level.FULL, Level.METADATA
SAMPLE_SHARE = 0.1

LARGE = (
    Load(name="100 B", first_ledger_id=1, ledger_count=10, entry_count=10_000, payload_bytes=100),
    Load(name="1 KB", first_ledger_id=101, ledger_count=10, entry_count=10_000, payload_bytes=1024),
    Load(name="64 KB", first_ledger_id=201, ledger_count=5, entry_count=400, payload_bytes=65_536),
)
SMALL = tuple(
    Load(
        name=f"{name}, ledgers of 10",
        first_ledger_id=first,
        ledger_count=count,
        entry_count=10,
        payload_bytes=size,
    )
    for name, first, count, size in (
        ("100 B", 1_001, 3_000, 100),
        ("1 KB", 5_001, 3_000, 1_024),
        ("64 KB", 9_001, 150, 65_536),
    )
)
LOADS = (*LARGE, *SMALL)
LEVELS = dict.fromkeys(LARGE, (SAMPLE, FULL)) | dict.fromkeys(SMALL, (METADATA, ENDS, FULL))
"""The levels of each load. The ends of large ledgers take too little time to measure."""
JAVAS = (LARGE[1], SMALL[1])
"""The loads that Java's auditor checks as well. They are alone on the bookies, because it always
checks all ledgers."""
QUICK = (LARGE[1], SMALL[1])
