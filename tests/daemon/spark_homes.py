"""Folders that look like an installed Spark, and an environment without one."""

import os
from pathlib import Path


def environment_without_spark() -> dict[str, str]:
    """Return this process's environment without variables of Spark.

    PySpark leaves some in it if another test started Spark.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SPARK_", "PYSPARK_"))
    }


def spark_home(folder: Path, *jars: str, script: str = "") -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "jars").mkdir()
    submit = folder / "bin/spark-submit"
    submit.write_text(f"#!/bin/sh\n{script}\n")
    submit.chmod(0o755)
    for jar in jars:
        (folder / "jars" / jar).touch()
    return folder
