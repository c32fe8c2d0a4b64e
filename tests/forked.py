"""Runs Python programs without importing our modules for each of them, by forking.

An import of all our modules takes half a second of CPU time, and the cluster tests start some 350
programs. Each test process therefore has one helper, ``python -m tests.forked``, that has imported
the modules. For each program the helper forks a child. The child gets its own arguments,
environment and output, and runs the module as ``python -m`` does.

A few tests start a real ``python`` on purpose, for example in ``test_node``.
"""

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

from daemon.local.processes import Child

PACKAGES = ("daemon", "checkpoints", "auditor", "replication", "ledgers")
OF_SPARK = ("auditor.fsck", "daemon.fsck")
"""Packages that the helper does not import: pyarrow starts threads, and threads do not survive a
fork."""
MESSAGE_BYTES_MAX = 1 << 20
START_TIMEOUT_S = 60.0
"""Deadline for the first child. It includes all imports of the helper, on a busy machine."""
PR_SET_PDEATHSIG = 1


class ForkedProcess:
    """A forked program, with the methods of ``subprocess.Popen`` that ``Child`` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdin = io.BytesIO()
        self._returncode: int | None = None
        self._has_ended = threading.Event()

    def poll(self) -> int | None:
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
        assert self._returncode is not None
        return self._returncode

    def send_signal(self, number: int) -> None:
        if self._returncode is None:
            with suppress(ProcessLookupError):  # it has ended, and its exit code is on its way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self, returncode: int) -> None:
        self._returncode = returncode
        self._has_ended.set()


class ForkedChild(Child):
    """A ``Child`` that is forked. ``command``: a module and its arguments."""

    def __init__(
        self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._process = fork(  # type: ignore[assignment]
                command, environment, out=output.fileno(), err=output.fileno()
            )


def fork(
    command: Sequence[str], environment: Mapping[str, str], *, out: int, err: int
) -> ForkedProcess:
    """Start a program. ``command``: a module and arguments. ``out``, ``err``: file descriptors."""
    return _forker().fork(command, environment, out=out, err=err)


def run(
    command: Sequence[str], environment: Mapping[str, str], *, timeout_s: float
) -> "subprocess.CompletedProcess[str]":
    """Run the program and capture its output, as ``subprocess.run`` does. Raises TimeoutExpired."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = fork(command, environment, out=out.fileno(), err=err.fileno())
        try:
            returncode = process.wait(timeout_s)
        finally:
            process.kill()
        said = []
        for each in (out, err):
            each.seek(0)
            said.append(each.read().decode())
        return subprocess.CompletedProcess(command, returncode, *said)


@cache
def _forker() -> "_Forker":
    return _Forker()


class _Forker:
    """Owns the helper, and a thread that receives the exit codes of its children."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=theirs.fileno(),
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the helper
        )
        theirs.close()
        self._running: dict[int, ForkedProcess] = {}
        """By process id. Only the listening thread uses it."""
        self._started: SimpleQueue[ForkedProcess] = SimpleQueue()
        self._lock = threading.Lock()
        """Held from a request until its answer."""
        threading.Thread(target=self._listen, name="forked", daemon=True).start()
        atexit.register(self.close)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._server.wait()

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], *, out: int, err: int
    ) -> ForkedProcess:
        request = {"command": list(command), "environment": dict(environment), "cwd": os.getcwd()}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [out, err])
            return self._started.get(timeout=START_TIMEOUT_S)

    def _listen(self) -> None:
        while message := self._socket.recv(MESSAGE_BYTES_MAX):
            told = json.loads(message)
            if "started" in told:
                process = ForkedProcess(told["started"])
                self._running[process.pid] = process
                self._started.put(process)
            else:
                self._running.pop(told["ended"]).end(told["returncode"])


# --- The process that forks -----------------------------------------------------------------------


def serve() -> None:
    """Fork a child for each request from the socket at stdin, until that is closed."""
    parent = socket.socket(fileno=os.dup(0))
    import_all()
    assert threading.active_count() == 1
    gc.freeze()
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker)
    while True:
        readable, _, _ = select.select([parent.fileno(), woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _tell_ended(parent)
        if parent.fileno() in readable:
            message, descriptors, _, _ = socket.recv_fds(parent, MESSAGE_BYTES_MAX, 2)
            if not message:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (woken, waker):
                    os.close(each)
                parent.close()
                become(json.loads(message), *descriptors)
            for each in descriptors:
                os.close(each)
            parent.send(json.dumps({"started": pid}).encode())


def import_all() -> None:
    for package in PACKAGES:
        found = importlib.import_module(package)
        for module in pkgutil.walk_packages(found.__path__, f"{package}."):
            if not module.name.startswith(OF_SPARK) and not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def _tell_ended(parent: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        returncode = os.waitstatus_to_exitcode(status)
        parent.send(json.dumps({"ended": pid, "returncode": returncode}).encode())


def become(request: dict[str, Any], out: int, err: int) -> NoReturn:
    """Run the program in this child, and end as the interpreter would."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for each in (out, err):
        os.close(each)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    module, *arguments = request["command"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    serve()
