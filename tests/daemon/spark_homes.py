"""Folders that look like an installed Spark."""

from pathlib import Path


def spark_home(folder: Path, *jars: str, script: str = "") -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "jars").mkdir()
    submit = folder / "bin/spark-submit"
    submit.write_text(f"#!/bin/sh\n{script}\n")
    submit.chmod(0o755)
    for jar in jars:
        (folder / "jars" / jar).touch()
    return folder
