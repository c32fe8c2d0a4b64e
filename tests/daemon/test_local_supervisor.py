"""The process behind ``local up``, with a cluster that needs no servers."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from daemon.local import supervisor
from daemon.local.cluster import LocalCluster
from daemon.local.spec import ClusterSpec
from daemon.local.status import status_of
from daemon.local.supervisor import NotRunningError, ask, start_detached
from ledgers.errors import SettingsError, UnavailableError
from ledgers.model import BookieId

SPEC = ClusterSpec(zookeeper_port=20_001, bookie_ports=(20_002, 20_003))


class FakeCluster:
    """Writes what happens into the file ``done`` of its folder."""

    spec, bookies = SPEC, SPEC.bookies

    def __init__(self, data: Path, on_event: Callable[[str], None]) -> None:
        self._data, self._on_event = data, on_event

    def _note(self, what: str) -> None:
        with (self._data / "done").open("a") as done:
            done.write(f"{what}\n")

    def kill(self, bookie: BookieId) -> None:
        self._note(f"kill {bookie}")

    def terminate(self, bookie: BookieId) -> bool:
        return False

    def start_bookie(self, bookie: BookieId) -> None:
        self._on_event("this goes to the log")

    def wipe(self, bookie: BookieId) -> None:
        raise UnavailableError("no such luck")

    def __enter__(self) -> "FakeCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self._note("stop")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that starts a supervisor on ``tmp_path``."""

    def make(data: Path, *, on_event: Callable[[str], None], error: Exception | None = None) -> Any:
        os.write(1, b"output of the supervisor\n")
        on_event("first")
        on_event("second")
        if error is not None:
            raise error
        return FakeCluster(data, on_event)

    monkeypatch.setattr(LocalCluster, "start", make)
    running = replace(status_of(SPEC, tmp_path), is_running=True)
    monkeypatch.setattr(supervisor, "status_of", lambda spec, data, cluster: running)

    def run(on_event: Callable[[str], None] = lambda event: None, **options: Any) -> Any:
        return start_detached(tmp_path, options, on_event=on_event)

    return run


def test_a_supervisor_in_the_background_does_what_it_is_asked(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    events: list[str] = []
    first, second = SPEC.bookies

    assert start(events.append).is_running
    assert events == ["first", "second"]
    status = ask(tmp_path, "status").status
    assert status is not None
    assert status.is_running
    assert ask(tmp_path, "kill", "2").text.startswith(f"killed {second}; ")
    assert "did not stop in time" in ask(tmp_path, "stop", "1").text
    assert ask(tmp_path, "start", "1").text == f"started {first}"
    with pytest.raises(UnavailableError, match="no such luck"):
        ask(tmp_path, "wipe", "1")
    with pytest.raises(SettingsError, match="there is no bookie 3"):
        ask(tmp_path, "kill", "3")

    assert ask(tmp_path, "down").text == "stopped"
    assert (tmp_path / "done").read_text() == f"kill {second}\nstop\n"
    log = (tmp_path / "logs" / "supervisor.log").read_text()
    assert log.startswith("output of the supervisor\n")
    assert "this goes to the log" in log
    with pytest.raises(NotRunningError):
        ask(tmp_path, "status")


@pytest.mark.parametrize("error", [SettingsError("wrong"), UnavailableError("broken")])
def test_the_error_of_a_start_is_that_of_the_command(
    start: Callable[..., Any], error: Exception
) -> None:
    with pytest.raises(type(error), match=str(error)):
        start(error=error)


def test_an_unexpected_end_names_the_log(start: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"see supervisor\.log"):
        start(error=AssertionError("a defect"))

    assert "a defect" in (tmp_path / "logs" / "supervisor.log").read_text()


def test_an_interrupted_start_ends_the_supervisor(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    def interrupt(event: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(interrupt)

    with pytest.raises(NotRunningError):
        ask(tmp_path, "status")
