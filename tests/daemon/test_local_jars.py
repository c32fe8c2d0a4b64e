"""Downloads of jars from a small HTTP server: complete or not at all, and once.

The class archive of a bookie: recorded by one JVM, used by later ones.
"""

import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from daemon.local import jars
from daemon.local.java import Java
from ledgers.errors import SettingsError, UnavailableError

JARS = {"org/x/first/1/first-1.jar": b"first", "org/x/native/1/native-1.nar": b"second"}


class Repository:
    """A Maven repository. ``files``: its files; ``asked``: the paths that were asked for."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.url = f"http://127.0.0.1:{server.server_port}/maven2"
        self.files, self.asked = dict(JARS), list[str]()


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    lines = [f"{hashlib.sha256(content).hexdigest()}  {path}" for path, content in JARS.items()]
    (tmp_path / "two.sha256").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """Serve the jars as the mirror of the environment. The cache is empty."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.removeprefix("/maven2/")
            found.asked.append(path)
            content = found.files.get(path)
            self.send_response(404 if content is None else 200)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Repository(server)
        monkeypatch.setenv("MAVEN_REPOSITORY_URL", f"{found.url}/")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield found
        server.shutdown()
        thread.join()


def test_jars_are_downloaded_into_the_users_cache(
    repository: Repository, lists: Path, tmp_path: Path
) -> None:
    progress: list[tuple[int, int]] = []

    folder = jars.fetch(
        "two", lists=lists, on_progress=lambda done, total: progress.append((done, total))
    )

    assert folder == tmp_path / "cache" / "bookmender" / "jars" / "two"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "first-1.jar": b"first",
        "native-1.nar": b"second",
    }
    assert progress == [(0, 2), (1, 2)]


def test_a_download_that_failed_goes_on_with_the_missing_jar(
    repository: Repository, lists: Path
) -> None:
    first, second = JARS
    del repository.files[second]
    with pytest.raises(UnavailableError, match=r"native-1\.nar.*404.*MAVEN_REPOSITORY_URL"):
        jars.fetch("two", lists=lists)
    assert os.listdir(jars.jars_folder("two")) == ["first-1.jar"]
    repository.files[second] = JARS[second]

    jars.fetch("two", lists=lists)
    jars.fetch("two", lists=lists)

    assert repository.asked == [first, second, second]


def test_a_jar_with_another_digest_is_not_kept(repository: Repository, lists: Path) -> None:
    repository.files[next(iter(JARS))] = b"forged"

    with pytest.raises(UnavailableError, match="SHA-256 differs"):
        jars.fetch("two", lists=lists)

    assert os.listdir(jars.jars_folder("two")) == []


def test_two_concurrent_downloads_run_once(repository: Repository, lists: Path) -> None:
    threads = [
        threading.Thread(target=jars.fetch, args=("two",), kwargs={"lists": lists})
        for _ in range(2)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert repository.asked == list(JARS)


@pytest.mark.parametrize("version", ["", "latest", "../two", "4.14.0"])
def test_a_version_without_a_list_is_refused(version: str) -> None:
    with pytest.raises(SettingsError, match=r"only 4\.18\.0, 4\.17\.3, 4\.16\.6"):
        jars.fetch(version)


@pytest.mark.parametrize("version", jars.versions())
def test_the_class_paths(version: str) -> None:
    bookkeeper, zookeeper = (
        [Path(jar).name for jar in path.split(os.pathsep)]
        for path in (jars.bookkeeper_classpath(version), jars.zookeeper_classpath(version))
    )

    assert bookkeeper[0] == f"bookkeeper-server-{version}.jar"
    assert any(name.endswith(".nar") for name in bookkeeper)
    assert not any(name.startswith("bookkeeper") for name in zookeeper)
    assert {"metrics-core-4.2.37.jar", "snappy-java-1.1.10.8.jar"} < set(zookeeper)


def test_a_class_archive_is_recorded_once_and_then_used(tmp_path: Path) -> None:
    java = Java(executable=Path("java"), major=17, version="17.0.15")
    archive, draft = jars.archive_path(tmp_path, java), tmp_path / "draft"
    assert archive != jars.archive_path(tmp_path, replace(java, version="17.0.16"))
    assert jars.archive_flags(archive, draft=None) == ()
    assert f"-XX:ArchiveClassesAtExit={draft}" in jars.archive_flags(archive, draft=draft)

    draft.write_text("classes")
    jars.keep_archive(draft, archive)

    assert [path.read_text() for path in tmp_path.iterdir()] == ["classes"]
    assert jars.archive_flags(archive, draft=draft)[0] == f"-XX:SharedArchiveFile={archive}"
