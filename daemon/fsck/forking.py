"""What Spark runs on this machine in place of PySpark's daemon: the same, but that all a task needs
is imported before workers are forked from it, once and not in each; and that while Spark itself
still starts.

PySpark's own imports nothing, as threads that a module starts would not live on in a worker. What
we need starts none of Python's; of those that numpy and pyarrow start the libraries themselves take
care when a process is forked.

So there are two processes. One is *started ahead*, by the run, and imports. The other is Spark's:
it hands over what Spark gave it, its environment and its pipes, and stays as long as the first one,
which from then on is PySpark's daemon. Where that is not there Spark's process does it all itself.
(What of an environment only the start of an interpreter heeds, as ``PYTHONPATH``, is so the
driver's.)
"""

import gc
import importlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory

WORKER = "pyspark.worker"
LOOKS = "auditor.fsck.spark.dispatch"
AHEAD = "BOOKMENDER_FSCK_AHEAD"
"""Of Spark's process: the socket on which the one that was started ahead waits for it."""
MESSAGE_MAX = 1 << 20
"""Bytes of an environment; a larger one is not handed over, as sockets take less."""
END_TIMEOUT_S = 5.0

_PIPES = (0, 1, 2)


@contextmanager
def started_ahead(python: str = sys.executable) -> Iterator[Mapping[str, str]]:
    """Around all that Spark does: with the settings that it needs, a process is under way that does
    as its daemon.

    ``python``: what executors run. The process is a group of its own, which no Ctrl-C reaches, and
    ends with ours.
    """
    with TemporaryDirectory(prefix="bookmender-fsck-") as folder:
        path = str(Path(folder, "ahead"))
        process = subprocess.Popen(
            [python, "-m", __name__, "--ahead", path], stdin=subprocess.PIPE, process_group=0
        )
        try:
            yield {
                "spark.python.daemon.module": __name__,
                f"spark.executorEnv.{AHEAD}": path,
            }
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Either process, until Spark ends it, or who started it."""
    if arguments[:1] == ["--ahead"]:
        if _taken_over(arguments[1]):
            _serve()
    elif not (AHEAD in environment and _handed_over(environment[AHEAD], environment)):
        _import_all()
        _serve()


def _import_all() -> None:
    sys.path[:] = without_archives(sys.path)
    gc.disable()  # what is imported is no garbage
    importlib.import_module(WORKER)
    importlib.import_module(LOOKS)
    importlib.import_module("auditor.fsck.spark.dispatch").set_up()
    gc.enable()


def _serve() -> None:
    importlib.import_module("pyspark.daemon").manager()


def _handed_over(path: str, environment: Mapping[str, str]) -> bool:
    """Spark's process, to its end; False, and nothing has happened, where nobody takes it over."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ahead:
        try:
            ahead.connect(path)
            socket.send_fds(ahead, [json.dumps(dict(environment)).encode()], _PIPES)
        except OSError:  # it has ended, as when Spark starts another daemon for one that died
            return False
        with suppress(OSError):
            ahead.recv(1)  # nothing comes, but the end
    return True


def _taken_over(path: str) -> bool:
    """The process that was started ahead, until it is Spark's; False when it is to end without.

    The folder of ``path`` goes when nobody is to find it any more: whoever made it may be killed.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(1)
        _import_all()
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        shutil.rmtree(Path(path).parent, ignore_errors=True)
        if sys.stdin in ready:  # who started us has ended, or does without
            return False
        sparks, _ = listener.accept()
    message, pipes, _, _ = socket.recv_fds(sparks, MESSAGE_MAX, len(_PIPES))
    if not message:
        return False
    os.environ.update(json.loads(message))
    for number, pipe in zip(_PIPES, pipes, strict=True):
        os.dup2(pipe, number)
        os.close(pipe)
    sparks.detach()  # open until we end, which Spark's process waits for
    return True


def without_archives(places: Sequence[str]) -> list[str]:
    """Where modules are looked for, but not in the archives that an installed PySpark has of
    itself.

    Spark puts them first, and nothing in them is compiled: 0.5 s of each process.
    """
    return [place for place in places if not _is_archive_of_one_of(places, PurePath(place))]


def _is_archive_of_one_of(places: Sequence[str], archive: PurePath) -> bool:
    """Whether it is ``pyspark/python/lib/*.zip`` in one of them."""
    return (
        archive.suffix == ".zip"
        and archive.parts[-4:-1] == ("pyspark", "python", "lib")
        and str(archive.parents[3]) in places
    )


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
