"""Work that a Python process of an executor avoids.

The tests run it in a process of its own, because pyarrow decides only once about pandas.
"""

import subprocess
import sys

import pytest

SET_UP = """
import gc, sys
import pyarrow as pa
from auditor.fsck.tasks import set_up
set_up()
set_up()
assert pa.array(["whole"], pa.string()).to_pylist() == ["whole"]
assert "pandas" not in sys.modules
"""


@pytest.mark.parametrize(
    "then",
    [
        pytest.param("import pandas", id="imported"),
        pytest.param(
            "assert list(pa.table({'n': [1]}).to_pandas()['n']) == [1]", id="used by pyarrow"
        ),
        pytest.param(
            "import pandas; assert pa.array(pandas.Series([1])).to_pylist() == [1]",
            id="given to pyarrow",
        ),
    ],
)
def test_pandas_is_imported_only_if_it_is_used(then: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SET_UP + then], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


def test_imported_objects_are_exempt_from_garbage_collection() -> None:
    then = "assert len(gc.get_objects()) < gc.get_freeze_count() / 10, len(gc.get_objects())"
    done = subprocess.run(
        [sys.executable, "-c", SET_UP + then], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
