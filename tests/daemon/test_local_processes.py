"""Child processes always end with their parent. Small programs replace the servers."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemon.local.processes import LAUNCHER, Child, Found, find, rss_bytes, stop_all, wait_until
from ledgers.errors import UnavailableError

TIMEOUT_S = 60.0

# Prints its own process id, then lives until it is killed.
SLEEPER = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('deaf', flush=True); time.sleep(600)",
]

ANSWERING = [
    sys.executable,
    "-c",
    "import signal, time; "
    "signal.signal(signal.SIGUSR1, lambda *_: print('alive', flush=True)); "
    "print('ready', flush=True); time.sleep(600)",
]

MakeChild = Callable[..., Child]


@pytest.fixture
def make_child(tmp_path: Path) -> Iterator[MakeChild]:
    made: list[Child] = []

    def make(command: list[str] = SLEEPER) -> Child:
        made.append(Child("child", command, log=tmp_path / "child.log"))
        return made[-1]

    yield make
    for child in made:
        child.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    wait_until(condition, [], timeout_s=TIMEOUT_S)


def has_ended(pid: int) -> bool:
    """Return True if the process has ended.

    An unreaped zombie, as in a container, has ended too.
    """
    found = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() in ("", "Z", "Zs")


@pytest.mark.parametrize(
    "platform",
    [
        pytest.param(sys.platform, id="the mechanism of this system"),
        pytest.param("another", id="a watcher, for kernels without a mechanism"),
    ],
)
def test_a_program_dies_when_its_parent_is_killed(platform: str) -> None:
    run_launcher = (
        f"import runpy, sys; sys.platform = {platform!r}; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    parent_code = (
        "import os, subprocess, sys\n"
        f"command = [sys.executable, '-c', {run_launcher!r}, {str(LAUNCHER)!r}, str(os.getpid())]\n"
        f"subprocess.Popen([*command, *{SLEEPER!r}], stdin=subprocess.PIPE).wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())

        parent.kill()

        wait_for(lambda: has_ended(pid))


def test_a_child_outlives_the_thread_that_asked_for_it(make_child: MakeChild) -> None:
    made: list[Child] = []

    def make() -> None:
        made.append(make_child(ANSWERING))
        # It has requested its parent's death signal.
        wait_for(lambda: made[0].log_tail() == "ready")

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    # The kernel has removed the thread too.
    wait_for(lambda: not Path(f"/proc/self/task/{thread.native_id}").exists())

    os.kill(made[0].pid, signal.SIGUSR1)

    wait_for(lambda: made[0].log_tail() == "ready\nalive")


def test_a_killed_child_has_ended_at_once(make_child: MakeChild) -> None:
    child = make_child()

    child.kill()

    assert not child.is_running
    assert child.exit_code == -signal.SIGKILL
    child.kill()  # does no harm


def test_a_paused_child_ends_on_request(make_child: MakeChild) -> None:
    child = make_child()
    wait_for(lambda: child.log_tail() != "")
    child.pause()

    child.terminate()

    assert child.wait(timeout_s=TIMEOUT_S)


def test_a_child_that_does_not_end_in_time_is_killed(make_child: MakeChild) -> None:
    child = make_child(STUBBORN)
    wait_for(lambda: child.log_tail() == "deaf")

    stop_all([child], timeout_s=0.05)

    assert child.exit_code == -signal.SIGKILL


def test_waiting_fails_with_the_log_of_a_child_that_ended(make_child: MakeChild) -> None:
    """The tail of a log prefers lines with errors."""
    code = "print('12:00 ERROR [main] no room\\nusage: …'); raise SystemExit(7)"
    child = make_child([sys.executable, "-c", code])

    with pytest.raises(UnavailableError, match=r"(?s)ended with code 7.*no room$"):
        wait_until(lambda: False, [child], timeout_s=TIMEOUT_S)


def test_waiting_names_the_logs_when_it_takes_too_long(make_child: MakeChild) -> None:
    child = make_child()

    with pytest.raises(UnavailableError, match=str(child.log)):
        wait_until(lambda: False, [child], timeout_s=0)


def test_the_log_tail_has_only_the_present_run(make_child: MakeChild) -> None:
    first = make_child([sys.executable, "-c", "print('first run')"])
    first.wait(timeout_s=TIMEOUT_S)

    second = make_child([sys.executable, "-c", "print('second run')"])
    second.wait(timeout_s=TIMEOUT_S)

    assert second.log_tail() == "second run"
    assert first.log.read_text() == "first run\nsecond run\n"


def test_memory_is_known_only_of_a_running_process() -> None:
    own_bytes = rss_bytes(os.getpid())

    assert own_bytes is not None
    assert own_bytes > 1 << 20
    assert rss_bytes(2**22 + 1) is None  # above the highest process id


def test_an_unbound_child_is_found_by_its_argument(tmp_path: Path) -> None:
    mark = f"-Dserver={tmp_path}"
    child = Child("child", [*SLEEPER, mark], log=tmp_path / "log", is_bound=False)
    pid = find(mark)
    assert pid == child.pid
    found = Found("child", pid, mark, log=tmp_path / "log")

    assert found.is_running
    assert find(mark[:-1]) is None
    found.kill()

    assert not found.is_running
    assert child.wait(timeout_s=TIMEOUT_S)
    assert find(mark) is None
