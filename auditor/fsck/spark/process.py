"""Prepares a Python process of an executor: turns off what only costs time there."""

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
    """Call before each task's work: one process runs many tasks."""
    _quiet_logs()
    _spare_pandas()
    _spare_the_collector()


def _quiet_logs() -> None:
    """Log errors only, to standard error. Handled errors of bookies are in the results already; the
    executor's output is for unexpected ones."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _spare_the_collector() -> None:
    """Make the garbage collector run less often, as in a node. A checked ledger's objects form no
    cycles, so reference counting frees them first. At level ``metadata`` the collector took a
    twentieth of the CPU.

    Imported objects are frozen: PySpark scans all other objects after each task, which took 40 ms.
    """
    gc.set_threshold(YOUNG_OBJECTS_MAX)
    if not gc.get_freeze_count():
        gc.freeze()


def _spare_pandas() -> None:
    """Prevent pyarrow from importing pandas with its first array. The import takes 0.25 s and 40 MB
    in each process. Pandas is installed because Spark needs it, but we pass none of its objects."""
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
