"""Decides which environment variables Spark starts with.

A storage host may have the variables of another Spark. A run on this machine uses none of them:
PySpark brings all that the run needs. On a cluster the variables may be needed to reach that
cluster, so they stay, except the one for Spark Connect, which fsck cannot use.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
UNNAMED = "bookmender"
"""Name for Spark of a user id that has no name."""
_OF_ANOTHER_SPARK = re.compile(r"SPARK_.*|PYSPARK_.*|(HADOOP|YARN)_CONF_DIR|MASTER")
_OF_SPARK_CONNECT = re.compile("SPARK_REMOTE")
_KEPT = {"SPARK_LOCAL_DIRS"}
"""Variables that stay. The folder for temporary files depends on this host, not on the Spark that
uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """The variables that Spark starts with. ``ignored``: names that this process has and Spark does
    not get, sorted."""

    variables: Mapping[str, str]
    ignored: tuple[str, ...] = ()


def launch_environment(
    environment: Mapping[str, str], *, is_here: bool, pyspark_home: Path, home: Path | None = None
) -> LaunchEnvironment:
    """Return what Spark starts with, given the environment of this process.

    ``is_here``: True if all of Spark runs on this machine. ``pyspark_home``: of the PySpark that
    this process imports; its folder contains ``bin/spark-submit`` and ``jars``. ``home``: the home
    folder for a user id without an entry in the user database; None if it has one.
    """
    foreign = _OF_ANOTHER_SPARK if is_here else _OF_SPARK_CONNECT
    variables = {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not foreign.fullmatch(name)
    }
    if is_here:
        # Without SPARK_HOME PySpark looks for a Spark in the parent of the current folder first,
        # and without SPARK_LOCAL_IP Spark looks up the name of this host, which may not resolve.
        variables |= {"SPARK_HOME": str(pyspark_home), "SPARK_LOCAL_IP": LOOPBACK}
    if home is not None:
        # Java finds the name and the home folder only in the user database, and without them Ivy
        # and Hadoop, which are parts of Spark, do not start.
        if (own := variables.get("HOME", "")) and os.path.isabs(own) and os.access(own, os.W_OK):
            home = Path(own)
        name = variables.get("SPARK_USER") or variables.get("HADOOP_USER_NAME") or UNNAMED
        java = f'"-Duser.home={home}" -Duser.name={name}'
        options = [variables.get("SPARK_SUBMIT_OPTS", ""), java]
        variables |= {
            "SPARK_USER": name,
            "HADOOP_USER_NAME": name,
            "SPARK_SUBMIT_OPTS": " ".join(filter(None, options)),
        }
    return LaunchEnvironment(
        variables=variables,
        ignored=tuple(
            sorted(name for name, value in environment.items() if value != variables.get(name, ""))
        ),
    )


@contextmanager
def applied(launch: LaunchEnvironment) -> Iterator[None]:
    """Set the variables for Spark in this process, which PySpark passes on, and restore them
    afterwards."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(launch.variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
