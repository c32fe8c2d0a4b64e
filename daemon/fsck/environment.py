"""Which of this process's environment variables Spark is started with.

A storage host may have those of another Spark. A run on this machine alone leans on none of them: PySpark brings all
that it needs. On a cluster they may be what it takes to reach it: there, what cannot work is named before Spark starts.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from ledgers.errors import SettingsError

LOOPBACK = "127.0.0.1"
_SPARKS_OWN = re.compile(
    r"SPARK_.*|PYSPARK_(SUBMIT_ARGS|DRIVER_PYTHON.*)|(HADOOP|YARN)_CONF_DIR|MASTER"
)
_KEPT = {"SPARK_LOCAL_DIRS"}
"""Where there is room for temporary files does not depend on which Spark it is."""
CHANGES_SPARK = (
    "SPARK_HOME",
    "SPARK_CONF_DIR",
    "PYSPARK_SUBMIT_ARGS",
    "SPARK_SUBMIT_OPTS",
    "HADOOP_CONF_DIR",
)
"""Whichever of these is set has a part in what Spark does on a cluster."""


@contextmanager
def spark_environment(master: str, *, is_here: bool) -> Iterator[list[str]]:
    """Within it this process has the variables that Spark is to start with. Gives the names of those that have a part in
    what it does. ``is_here``: whether all of it runs on this machine. Raises SettingsError that names the variable with
    which Spark cannot start."""
    before = dict(os.environ)
    if not is_here:
        check_for_cluster(master, before, version=metadata.version("pyspark"))
        yield [name for name in CHANGES_SPARK if before.get(name)]
        return
    _set_environment(for_this_machine(before))
    try:
        yield []
    finally:
        _set_environment(before)


def _set_environment(environment: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def for_this_machine(environment: Mapping[str, str]) -> dict[str, str]:
    """No host name is looked up then, either: the host's own may not resolve."""
    kept = {n: v for n, v in environment.items() if n in _KEPT or not _SPARKS_OWN.fullmatch(n)}
    return {**kept, "SPARK_LOCAL_IP": LOOPBACK}


def check_for_cluster(master: str, environment: Mapping[str, str], *, version: str) -> None:
    """``version``: PySpark's, as in 4.1.0. Raises SettingsError."""
    if "SPARK_REMOTE" in environment:
        raise SettingsError(
            "SPARK_REMOTE is set, for Spark Connect, which fsck cannot use: unset it, and name the cluster's master "
            "with --master"
        )
    for option in shlex.split(environment.get("PYSPARK_SUBMIT_ARGS", "")):
        if option.partition("=")[0] in {"--master", "--remote"}:
            raise SettingsError(
                f"PYSPARK_SUBMIT_ARGS has {option}, which goes against --master {master}: unset it, and say with "
                "--spark-conf what else it has"
            )
    if home := environment.get("SPARK_HOME"):
        _check_home(Path(home), version)


def _check_home(home: Path, version: str) -> None:
    remedy = f"unset SPARK_HOME, so that PySpark {version} runs its own, or set it to a Spark of that version"
    if not (home / "bin/spark-submit").is_file():
        raise SettingsError(f"SPARK_HOME is {home}, which has no bin/spark-submit: {remedy}")
    there = [
        found[1]
        for jar in home.glob("jars/spark-core_*.jar")
        if (found := re.search(r"_[\d.]+-(.+)\.jar$", jar.name))
    ]
    if not any(
        each == version or each.startswith((f"{version}-", f"{version}.")) for each in there
    ):
        which = f"Spark {there[0]}" if there else "no Spark (jars/spark-core_*.jar)"
        raise SettingsError(f"SPARK_HOME is {home}, which has {which}: {remedy}")
