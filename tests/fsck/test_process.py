"""What a Python process of an executor's is spared. In one of its own: pyarrow decides on pandas
once and for all."""

import subprocess
import sys

import pytest

SET_UP = """
import gc, sys
import pyarrow as pa
from auditor.fsck.spark.dispatch import set_up
set_up()
set_up()
assert pa.array(["whole"], pa.string()).to_pylist() == ["whole"]
assert "pandas" not in sys.modules
"""


@pytest.mark.parametrize(
    "then",
    [
        pytest.param("import pandas", id="imported"),
        pytest.param("assert list(pa.table({'n': [1]}).to_pandas()['n']) == [1]", id="made"),
        pytest.param(
            "import pandas; assert pa.array(pandas.Series([1])).to_pylist() == [1]", id="taken"
        ),
    ],
)
def test_pandas_is_imported_only_by_who_needs_it(then: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SET_UP + then], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


def test_what_was_imported_is_no_longer_gone_through_after_each_task() -> None:
    then = "assert len(gc.get_objects()) < gc.get_freeze_count() / 10, len(gc.get_objects())"
    done = subprocess.run(
        [sys.executable, "-c", SET_UP + then], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
