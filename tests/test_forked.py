"""Programs that are forked instead of started."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.forked import ForkedChild, run

TIMEOUT_S = 60.0


def test_a_program_has_its_own_environment_output_and_exit_code() -> None:
    environment = {"PATH": os.environ["PATH"], "BOOKMENDER_NO_SUCH_SETTING": "1"}

    ended = run(["daemon", "status"], environment, timeout_s=TIMEOUT_S)

    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "BOOKMENDER_NO_SUCH_SETTING" in ended.stderr
    assert "BOOKMENDER_NO_SUCH_SETTING" not in os.environ


def test_a_program_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run(["http.server", "0", "--bind", "127.0.0.1"], os.environ, timeout_s=0.1)


def test_a_killed_child_has_the_signal_as_its_exit_code(tmp_path: Path) -> None:
    server = ["http.server", "0", "--bind", "127.0.0.1"]
    killed, told = (
        ForkedChild(name, server, log=tmp_path / f"{name}.log", environment=os.environ)
        for name in ("killed", "told")
    )
    assert killed.is_running

    killed.kill()
    told.terminate()

    assert told.wait(timeout_s=TIMEOUT_S)
    assert (killed.exit_code, told.exit_code) == (-signal.SIGKILL, -signal.SIGTERM)
    assert not killed.is_running
