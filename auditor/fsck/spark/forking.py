"""What Spark runs on this machine in place of PySpark's daemon: the same, but that all a task needs is imported
before workers are forked from it, once and not in each.

PySpark's own imports nothing, as threads that a module starts would not live on in a worker. What we need starts
none of Python's; of those that numpy and pyarrow start the libraries themselves take care when a process is forked.
"""

import gc
import importlib
import sys
from collections.abc import Sequence
from pathlib import PurePath

WORKER = "pyspark.worker"
LOOKS = "auditor.fsck.spark.looks"


def main() -> None:
    """Until Spark ends it."""
    sys.path[:] = without_archives(sys.path)
    gc.disable()  # what is imported is no garbage
    importlib.import_module(WORKER)
    importlib.import_module(LOOKS)
    importlib.import_module("auditor.fsck.spark.process").set_up()
    gc.enable()
    importlib.import_module("pyspark.daemon").manager()


def without_archives(places: Sequence[str]) -> list[str]:
    """Where modules are looked for, but not in the archives that an installed PySpark has of itself.

    Spark puts them first, and nothing in them is compiled: 0.5 s of each process.
    """
    return [place for place in places if not _is_archive_of_one_of(places, PurePath(place))]


def _is_archive_of_one_of(places: Sequence[str], archive: PurePath) -> bool:
    """Whether it is ``pyspark/python/lib/*.zip`` in one of them."""
    return (
        archive.suffix == ".zip"
        and archive.parts[-4:-1] == ("pyspark", "python", "lib")
        and str(archive.parents[3]) in places
    )


if __name__ == "__main__":
    main()
