"""A run of fsck in a process of its own, which tests kill.

``python -m tests.fsck_driver MASTER URI OUTPUT RUN READS``.
"""

import json
import sys
from pathlib import Path

from auditor.fsck.options import FsckJob, FsckOptions, FsckProgress, Level
from auditor.fsck.results.plan import PART_MAX
from auditor.fsck.run import run_fsck
from auditor.fsck.spark import Dispatch
from tests.spark_cluster import spark_session

PARTS = 6


def main(master: str, uri: str, output: str, run: str, reads_per_s: str) -> None:
    """Run at level ``full``. Print each progress, and then the summary as a line of JSON."""
    PART_MAX[Level.FULL] = 42 // PARTS  # ledgers
    options = FsckOptions(
        metadata_service_uri=uri, level=Level.FULL, reads_per_s=int(reads_per_s), seed=1
    )
    job = FsckJob(run=run, output=Path(output))
    with spark_session(master) as spark:
        summary = run_fsck(Dispatch(spark.sparkContext, f"fsck {job.run}"), options, job, _show)
    print(json.dumps(summary.to_record()), flush=True)


def _show(progress: FsckProgress) -> None:
    print(progress, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
