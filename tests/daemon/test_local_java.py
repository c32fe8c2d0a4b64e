"""Finds the Java that the local cluster uses. Scripts replace Java."""

from pathlib import Path

import pytest

from daemon.local.java import Java
from ledgers.errors import SettingsError


def install(folder: Path, version_line: str, *, exit_code: int = 0) -> Path:
    """Install a ``java`` that answers -version with this line on standard error."""
    folder.mkdir(parents=True, exist_ok=True)
    executable = folder / "java"
    executable.write_text(f"#!/bin/sh\necho '{version_line}' >&2\nexit {exit_code}\n")
    executable.chmod(0o755)
    return executable


def test_java_is_found_on_the_path(tmp_path: Path) -> None:
    executable = install(tmp_path, 'openjdk version "21.0.3" 2024-04-16')

    java = Java.find({"PATH": str(tmp_path)})

    assert java == Java(executable=executable, major=21, version="21.0.3")


def test_java_home_has_priority_over_the_path(tmp_path: Path) -> None:
    install(tmp_path / "path", 'openjdk version "21.0.3"')
    executable = install(tmp_path / "home" / "bin", 'openjdk version "17.0.15"')

    java = Java.find({"PATH": str(tmp_path / "path"), "JAVA_HOME": str(tmp_path / "home")})

    assert java == Java(executable=executable, major=17, version="17.0.15")


def test_a_java_home_without_java_is_refused(
    tmp_path: Path,
) -> None:
    """No other Java is used instead."""
    install(tmp_path, 'openjdk version "17.0.15"')
    home = tmp_path / "gone"

    with pytest.raises(SettingsError) as refused:
        Java.find({"PATH": str(tmp_path), "JAVA_HOME": str(home)})

    assert str(refused.value).startswith(f"JAVA_HOME is {home}, which has no bin/java: ")


def test_an_empty_java_home_is_ignored(tmp_path: Path) -> None:
    executable = install(tmp_path, 'openjdk version "17.0.15"')

    java = Java.find({"PATH": str(tmp_path), "JAVA_HOME": ""})

    assert java.executable == executable


@pytest.mark.parametrize(
    ("version_line", "exit_code"),
    [
        pytest.param('java version "1.8.0_402"', 0, id="numbered in the old way"),
        pytest.param('openjdk version "11.0.22"', 0, id="too old for 4.18"),
        pytest.param("no Java runtime present", 1, id="the placeholder that macOS has"),
    ],
)
def test_an_unsuitable_java_is_refused_with_advice(
    tmp_path: Path, version_line: str, exit_code: int
) -> None:
    install(tmp_path, version_line, exit_code=exit_code)

    with pytest.raises(SettingsError, match="install Java 17"):
        Java.find({"PATH": str(tmp_path)})


def test_without_java_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no Java found: install Java 17"):
        Java.find({"PATH": str(tmp_path)})


def test_a_failing_java_is_reported_with_its_option_variables(
    tmp_path: Path,
) -> None:
    install(tmp_path, "Unrecognized option: -Xfoo", exit_code=1)

    with pytest.raises(SettingsError, match="perhaps because of JAVA_TOOL_OPTIONS: unset"):
        Java.find({"PATH": str(tmp_path), "JAVA_TOOL_OPTIONS": "-Xfoo"})
