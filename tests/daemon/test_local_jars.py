"""Downloads of jars: complete or not at all, and once. Scripts replace Ivy (as Java) and Maven."""

import importlib.util
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.local import jars
from daemon.local.java import Java
from ledgers.errors import SettingsError, UnavailableError

VERSION = "4.18.0"
SERVER = f"bookkeeper-server-{VERSION}.jar"

# Among Ivy's arguments, the retrieve pattern has the folder, before "/[artifact]".
IVY_FOLDER = 'for last; do :; done; folder="${last%%/\\[*}"; mkdir -p "$folder"\n'
IVY_GOOD = (
    IVY_FOLDER
    + f"printf '\\tfound a in x\\n\\tfound b in x\\n'\ntouch \"$folder/{SERVER}\"\n"
    + "echo '[SUCCESSFUL ] a'\ntouch \"$folder/native-1.nar\"\necho '[SUCCESSFUL ] b'\n"
)
IVY_CUT_SHORT = IVY_FOLDER + 'touch "$folder/half.jar"\necho "module not found: x"\nexit 1\n'
MAVEN_GOOD = (
    f'for last; do :; done; folder="${{last#*=}}"; mkdir -p "$folder"; touch "$folder/{SERVER}"\n'
)

Install = Callable[[str, str], Path]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs scripts as the only programs. Home and cache are empty."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.defpath}")
    monkeypatch.setattr(shutil, "which", lambda name: _which(folder, name))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def install(name: str, script: str) -> Path:
        executable = folder / name
        executable.write_text(f"#!/bin/sh\n{script}")
        executable.chmod(0o755)
        return executable

    return install


def _which(folder: Path, name: str) -> str | None:
    return str(folder / name) if (folder / name).exists() else None


def java(executable: Path) -> Java:
    return Java(executable=executable, major=17)


def test_jars_are_downloaded_into_the_users_cache(tools: Install, tmp_path: Path) -> None:
    folder = jars.fetch(VERSION, java(tools("java", IVY_GOOD)))

    assert folder == tmp_path / "cache" / "bookmender" / "jars" / VERSION
    assert sorted(path.name for path in folder.iterdir()) == [SERVER, "native-1.nar"]


def test_the_class_path_has_bookkeeper_first_and_native_archives(tools: Install) -> None:
    jars.fetch(VERSION, java(tools("java", IVY_GOOD)))

    names = [Path(jar).name for jar in jars.bookkeeper_classpath(VERSION).split(os.pathsep)]

    assert names == [SERVER, "native-1.nar"]


def test_progress_has_the_total_with_the_first_jar(tools: Install) -> None:
    progress: list[tuple[int, int | None]] = []

    jars.fetch(
        VERSION,
        java(tools("java", IVY_GOOD)),
        on_progress=lambda done, total: progress.append((done, total)),
    )

    assert progress == [(0, None), (0, None), (1, 2), (2, 2)]


def test_existing_jars_are_not_downloaded_again(tools: Install) -> None:
    first = jars.fetch(VERSION, java(tools("java", IVY_GOOD)))

    second = jars.fetch(VERSION, java(tools("java", "exit 1")))

    assert second == first


def test_a_failed_download_leaves_nothing_behind(tools: Install) -> None:
    with pytest.raises(UnavailableError, match=r"ivy: module not found: x; mvn: not found"):
        jars.fetch(VERSION, java(tools("java", IVY_CUT_SHORT)))

    assert os.listdir(jars.jars_folder(VERSION).parent) == ["lock"]


def test_an_interrupted_download_leaves_nothing_behind(tools: Install) -> None:
    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        jars.fetch(VERSION, java(tools("java", IVY_GOOD)), on_progress=interrupt)

    assert os.listdir(jars.jars_folder(VERSION).parent) == ["lock"]


def test_maven_is_used_if_ivy_fails(tools: Install) -> None:
    tools("mvn", MAVEN_GOOD)

    folder = jars.fetch(VERSION, java(tools("java", IVY_CUT_SHORT)))

    assert os.listdir(folder) == [SERVER]  # and no file of Ivy


def test_maven_comes_first_if_the_user_has_maven_settings(tools: Install, tmp_path: Path) -> None:
    settings = tmp_path / "home" / ".m2" / "settings.xml"
    settings.parent.mkdir(parents=True)
    settings.touch()
    tools("mvn", MAVEN_GOOD)

    folder = jars.fetch(VERSION, java(tools("java", IVY_GOOD)))

    assert os.listdir(folder) == [SERVER]  # the fake Ivy provides a second jar


def test_a_tool_that_succeeds_without_the_jar_has_failed(tools: Install) -> None:
    with pytest.raises(UnavailableError, match="ivy: jars are missing"):
        jars.fetch(VERSION, java(tools("java", "exit 0")))


def test_log4j_api_is_downloaded_apart_if_ivy_omits_it(tools: Install) -> None:
    script = (
        IVY_FOLDER
        + 'case "$*" in\n'
        + '*log4j-api*) touch "$folder/log4j-api-2.18.0.jar" ;;\n'
        + f'*) touch "$folder/{SERVER}" "$folder/log4j-core-2.18.0.jar" ;;\n'
        + "esac\n"
    )

    folder = jars.fetch(VERSION, java(tools("java", script)))

    assert (folder / "log4j-api-2.18.0.jar").exists()


def test_two_concurrent_downloads_run_once(tools: Install, tmp_path: Path) -> None:
    script = tools("java", f'echo run >> "{tmp_path}/runs"\n' + IVY_GOOD)
    threads = [threading.Thread(target=jars.fetch, args=(VERSION, java(script))) for _ in range(2)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (tmp_path / "runs").read_text() == "run\n"


@pytest.mark.parametrize("version", ["", "latest", "../4.18.0", "4.18.0/x"])
def test_a_malformed_version_is_refused(tools: Install, version: str) -> None:
    with pytest.raises(SettingsError, match="not a version of BookKeeper"):
        jars.fetch(version, java(tools("java", IVY_GOOD)))


def test_without_pyspark_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(SettingsError, match=r"pip install '\.\[local\]'"):
        jars.spark_jars_folder()


def test_zookeeper_needs_few_of_sparks_jars() -> None:
    names = [Path(jar).name for jar in jars.zookeeper_classpath().split(os.pathsep)]

    assert any(name.startswith("zookeeper-3") for name in names)
    assert not any(name.startswith("spark") for name in names)
