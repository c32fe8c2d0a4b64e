"""Decides which environment variables Spark starts with, and which of them make a start impossible.

A storage host may have the variables of another Spark. A run on this machine uses none of them:
PySpark brings all that the run needs. On a cluster the variables may be needed to reach that
cluster, so they stay; a variable with which no start can succeed is named before anything starts.
"""

import importlib.util
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ledgers.errors import SettingsError

LOOPBACK = "127.0.0.1"
UNNAMED = "bookmender"
"""Name for Spark of a user id that has no name."""
EXECUTORS_PYTHON = "spark.pyspark.python"
_OF_ANOTHER_SPARK = re.compile(r"SPARK_.*|PYSPARK_.*|(HADOOP|YARN)_CONF_DIR|MASTER")
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
    master: str,
    environment: Mapping[str, str],
    *,
    is_here: bool,
    pyspark_home: Path,
    version: str,
    spark_settings: Mapping[str, str],
    home: Path | None = None,
) -> LaunchEnvironment:
    """Return what Spark starts with, given the environment of this process.

    ``is_here``: True if all of Spark runs on this machine. ``pyspark_home``, ``version``: of the
    PySpark that this process imports; its folder contains ``bin/spark-submit`` and ``jars``.
    ``home``: the home folder for a user id without an entry in the user database; None if it has
    one. Raises SettingsError, which names the variable or option with which Spark cannot start.
    """
    if is_here:
        python = spark_settings.get(EXECUTORS_PYTHON)
        if python and shutil.which(python, path=environment.get("PATH")) is None:
            raise SettingsError(
                f"--spark-conf {EXECUTORS_PYTHON} is {python}, which does not exist on this "
                "machine: omit the option, or correct the path"
            )
        kept = {
            name: value
            for name, value in environment.items()
            if name in _KEPT or not _OF_ANOTHER_SPARK.fullmatch(name)
        }
        # Without SPARK_HOME PySpark looks for a Spark in the parent of the current folder first,
        # and without SPARK_LOCAL_IP Spark looks up the name of this host, which may not resolve.
        variables = {**kept, "SPARK_HOME": str(pyspark_home), "SPARK_LOCAL_IP": LOOPBACK}
    else:
        check_for_cluster(master, environment, version=version)
        variables = dict(environment)
    if home is not None:
        variables |= _user(variables, home)
    return LaunchEnvironment(
        variables=variables,
        ignored=tuple(
            sorted(name for name, value in environment.items() if value != variables.get(name, ""))
        ),
    )


def _user(variables: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return variables that give Spark's JVM a user. Java finds the name and the home folder only
    in the user database, and without them Ivy and Hadoop, which are parts of Spark, do not start.
    """
    if (own := variables.get("HOME", "")) and os.path.isabs(own) and os.access(own, os.W_OK):
        home = Path(own)
    name = variables.get("SPARK_USER") or variables.get("HADOOP_USER_NAME") or UNNAMED
    options = [variables.get("SPARK_SUBMIT_OPTS", ""), f'"-Duser.home={home}" -Duser.name={name}']
    return {
        "SPARK_USER": name,
        "HADOOP_USER_NAME": name,
        "SPARK_SUBMIT_OPTS": " ".join(filter(None, options)),
    }


def check_for_cluster(master: str, environment: Mapping[str, str], *, version: str) -> None:
    """Check the variables for a start on a cluster. ``version``: PySpark's, as in 4.1.0. Raises
    SettingsError."""
    if "SPARK_REMOTE" in environment:
        raise SettingsError(
            "SPARK_REMOTE is set, for Spark Connect, which fsck cannot use: unset it, and give the "
            "cluster's master with --master"
        )
    arguments = environment.get("PYSPARK_SUBMIT_ARGS", "")
    try:
        options = shlex.split(arguments)
    except ValueError as error:
        raise SettingsError(
            f"PYSPARK_SUBMIT_ARGS cannot be parsed ({error}): unset it, or correct {arguments!r}"
        ) from error
    for option in options:
        if option.partition("=")[0] in {"--master", "--remote"}:
            raise SettingsError(
                f"PYSPARK_SUBMIT_ARGS has {option}, which contradicts --master {master}: unset it, "
                "and give its other settings with --spark-conf"
            )
    if options and options[-1] != "pyspark-shell":
        raise SettingsError(
            "PYSPARK_SUBMIT_ARGS does not end with pyspark-shell, so Spark would not start: unset "
            "it, and give its settings with --spark-conf"
        )
    if home := environment.get("SPARK_HOME"):
        _check_home(Path(home), version)


def _check_home(home: Path, version: str) -> None:
    remedy = (
        f"unset SPARK_HOME, so that PySpark {version} runs its own, or set it to a Spark of that "
        "version"
    )
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


def check_origin(folder: Path, installed: Path | None, environment: Mapping[str, str]) -> None:
    """Check that the PySpark in ``folder``, which Python imports, is the ``installed`` one.

    The profile of a host with another Spark often sets PYTHONPATH to that Spark's Python files:
    they come first, and are of another release. ``installed``: None if no package names its
    folder. Raises SettingsError.
    """
    if installed is None or folder == installed:
        return
    places = environment.get("PYTHONPATH", "").split(os.pathsep)
    if any(place and Path(place) in (folder, *folder.parents) for place in places):
        remedy = "unset PYTHONPATH, which names it"
    else:
        remedy = "remove it from Python's path"
    raise SettingsError(f"PySpark would be imported from {folder}, not from {installed}: {remedy}")


def check_import(environment: Mapping[str, str]) -> None:
    """Check that Python imports the PySpark that is installed for bookmender. Raises
    SettingsError."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        return  # the import says what to install
    try:
        installed = Path(str(metadata.distribution("pyspark").locate_file("pyspark"))).resolve()
    except metadata.PackageNotFoundError:
        return
    folder = Path(spec.origin).resolve().parent
    check_origin(folder, installed if installed.is_dir() else None, environment)


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
