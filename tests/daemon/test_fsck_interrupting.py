"""Ctrl-C during a run of fsck silences Spark."""

import logging
import signal

import pytest

from daemon.fsck.runner import quiet_when_interrupted


def test_ctrl_c_silences_spark() -> None:
    levels: list[str] = []
    before = signal.getsignal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), quiet_when_interrupted(levels.append):
        signal.raise_signal(signal.SIGINT)

    assert levels == ["OFF"]
    assert logging.root.manager.disable == logging.CRITICAL  # py4j would log the interrupted call
    assert signal.getsignal(signal.SIGINT) is before
    logging.disable(logging.NOTSET)


def test_a_signal_handler_installed_meanwhile_stays() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with quiet_when_interrupted():
            signal.signal(signal.SIGINT, signal.SIG_IGN)

        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
