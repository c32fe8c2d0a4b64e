"""A Python process of an executor's, set up for our work: it leaves alone what only costs time
there."""

import gc
import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import pyarrow as pa
import structlog

YOUNG_OBJECTS_MAX = 10_000


def set_up() -> None:
    """To be called before the work, each time: a process does one task after the other."""
    _quiet_logs()
    _spare_pandas()
    _spare_the_collector()


def _quiet_logs() -> None:
    """What a handled mishap of one bookie logs stands in the results as well; an executor's output
    is for what else goes wrong."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _spare_the_collector() -> None:
    """As in a node: what a ledger leaves behind hangs together in no cycles, and is gone before the
    garbage collector comes to look at it. At level metadata a twentieth of the CPU.

    And what was imported stays: PySpark goes through all objects after each task, for 40 ms.
    """
    gc.set_threshold(YOUNG_OBJECTS_MAX)
    if not gc.get_freeze_count():
        gc.freeze()


def _spare_pandas() -> None:
    """Have pyarrow do without: it imports pandas for its first array of all, if that is there, as
    it is for Spark.

    We give it none of pandas' objects; the import takes 0.25 s and 40 MB, of each process.
    """
    hidden = _HiddenPandas()
    sys.meta_path.insert(0, hidden)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(hidden)


class _HiddenPandas(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ModuleNotFoundError("hidden from pyarrow", name=fullname)
        return None
