"""A local cluster as one object: starts it, stops it, and breaks it on purpose.

The owner of the object owns the processes: they end with the object, at the latest with this Python
process (``processes``). Those of a detached cluster go on, and a later command finds them. All
files are in one data folder (``folder``).
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from daemon.local import folder, jars, ports, servers, znodes
from daemon.local.java import Java
from daemon.local.processes import Child, await_spawns, stop_all, wait_until
from daemon.local.security import FOLDER, Secrets, settings_file
from daemon.local.spec import ClusterSpec, bookie_id, port_of, settle
from ledgers.errors import SettingsError, UnavailableError
from ledgers.model import BookieId
from ledgers.security import OPEN, SecuritySettings

READY_TIMEOUT_S = 60.0
TERMINATE_TIMEOUT_S = 30.0
"""A bookie flushes before it ends after SIGTERM. That takes time on a busy disk."""
STOP_TIMEOUT_S = 5.0
"""A bookie that receives SIGTERM just after its start may hang. It is then killed, which loses no
acknowledged entry."""
RESTARTS_MAX = 3
CUT_OFF = "ConnectionLossException"
"""In the log of a bookie that ended because ZooKeeper did not answer within a session timeout. On a
busy machine that happens while all processes start, with TLS above all."""
OnEvent = Callable[[str], None]
"""Receives a line about each step of the start, as it is shown to a user."""


class LocalCluster:
    """A running cluster. A context manager that stops the cluster at the end. Not thread-safe."""

    def __init__(
        self,
        processes: servers.Servers,
        spec: ClusterSpec,
        on_event: OnEvent,
        secrets: Secrets | None,
        lock: IO[str] | None = None,
    ) -> None:
        """Callers use ``start`` or ``find`` instead."""
        self._servers, self._spec = processes, spec
        self._lock, self._on_event = lock, on_event
        self.secrets = secrets
        """Certificates and passwords of a secured cluster."""
        self._zookeeper: Child | None = None
        self._bookies: dict[BookieId, Child] = {}
        self._autorecoveries: list[Child] = []
        self._was_ready = False
        """Otherwise the class archive of the first bookie has few classes."""

    @classmethod
    def start(
        cls,
        data: Path,
        *,
        bookies: int | None = None,
        is_secured: bool = False,
        is_detached: bool = False,
        on_event: OnEvent = lambda event: None,
        **asked: Any,
    ) -> "LocalCluster":
        """Start the cluster in the folder ``data``, which is created if necessary, and return when
        every server is ready.

        ``is_secured``: TLS, SASL and ACLs at all servers; needs openssl. ``is_detached``: the
        servers go on after this process. ``asked``: fields of ClusterSpec. One that is None keeps
        its saved value, else the default. Raises SettingsError if this cluster cannot be started,
        UnavailableError if a server does not become ready; then no process is left.
        """
        java = Java.find()
        data = data.resolve()
        with ExitStack() as undoing:  # also after Ctrl-C, no process is left
            lock = folder.lease(data)
            undoing.callback(lock.close)
            spec = settle(
                ClusterSpec.load(data),
                bookie_count=bookies,
                is_secured=is_secured,
                asked={name: value for name, value in asked.items() if value is not None},
            )
            _check_ports(spec)
            jars.fetch(
                spec.bookkeeper,
                on_progress=lambda done, total: on_event(
                    f"downloading BookKeeper, once: jar {done + 1} of {total}"
                ),
            )
            secrets = Secrets.make(data / FOLDER) if spec.is_secured else None
            if secrets is not None:
                secrets.write_settings(spec.metadata_service_uri)
            spec.save(data)
            held = lock.fileno() if is_detached else None
            processes = servers.Servers(data=data, java=java, is_bound=not is_detached, lock=held)
            cluster = cls(processes, spec, on_event, secrets, lock)
            if is_detached:
                undoing.callback(cls._stop_strays, data)
            undoing.callback(cluster.stop)
            cluster._start_zookeeper()
            with cluster.session() as tree:
                tree.format(spec.layout)
                for bookie in cluster.bookies:  # of an earlier run that ended in a crash
                    tree.delete_registration(bookie)
                wanted = [b for b in cluster.bookies if not cluster._is_dismissed(b, tree)]
            cluster._start_bookies(wanted)
            undoing.pop_all()
            cluster._was_ready = True
        return cluster

    @classmethod
    def _stop_strays(cls, data: Path) -> None:
        """Stop servers that Ctrl-C kept from being recorded in the object: they are not bound to
        this process."""
        await_spawns()
        if stray := cls.find(data):
            stray.stop(timeout_s=0)

    @classmethod
    def find(cls, data: Path) -> "LocalCluster | None":
        """Return the detached cluster that runs in this folder; None if no server runs."""
        spec = ClusterSpec.load(data)
        if spec is None:
            return None
        secrets = Secrets.load(data / FOLDER) if spec.is_secured else None
        processes = servers.Servers(data=data, is_bound=False)
        found = cls(processes, spec, lambda event: None, secrets)
        found._zookeeper, found._was_ready = processes.find("zookeeper"), True
        for bookie in spec.bookies:
            if child := processes.find(f"bookie-{port_of(bookie)}"):
                found._bookies[bookie] = child
        return found if found._zookeeper or found._bookies else None

    @property
    def spec(self) -> ClusterSpec:
        return self._spec

    @property
    def security(self) -> SecuritySettings:
        """What clients need."""
        return OPEN if self.secrets is None else self.secrets.client_settings

    @property
    def settings_file(self) -> Path | None:
        """Our settings for a secured cluster; None for another cluster."""
        return settings_file(self.data, self._spec)

    @property
    def data(self) -> Path:
        return self._servers.data

    @property
    def logs(self) -> Path:
        return self._servers.logs

    @property
    def metadata_service_uri(self) -> str:
        return self._spec.metadata_service_uri

    @property
    def zookeeper_address(self) -> str:
        return self._spec.zookeeper_address

    @property
    def bookies(self) -> tuple[BookieId, ...]:
        """All bookies, running or not."""
        return self._spec.bookies

    def pid(self, bookie: BookieId) -> int | None:
        """Return the process id of the bookie; None while it is down."""
        if bookie not in self.bookies:
            raise SettingsError(f"there is no bookie {bookie}, only {', '.join(self.bookies)}")
        child = self._bookies.get(bookie)
        return child.pid if child is not None and child.is_running else None

    @property
    def zookeeper_pid(self) -> int | None:
        child = self._zookeeper
        return child.pid if child is not None and child.is_running else None

    def zookeeper_monitor(self) -> dict[str, str]:
        """Return the answer to ``mntr``, e.g. ``zk_packets_received``."""
        return servers.zookeeper_monitor(self._spec.zookeeper_port)

    def session(self) -> AbstractContextManager[znodes.Znodes]:
        """Open a short session that may read and delete all znodes."""
        superuser = None if self.secrets is None else self.secrets.superuser
        return znodes.session(self._spec.zookeeper_port, superuser=superuser)

    def writable(self) -> frozenset[BookieId]:
        """Return the bookies that are registered as writable. A killed bookie is included until its
        session has expired."""
        with self.session() as tree:
            return tree.writable()

    def read_only(self) -> frozenset[BookieId]:
        with self.session() as tree:
            return tree.read_only()

    def kill(self, bookie: BookieId) -> None:
        """Kill the bookie with SIGKILL, as a crash would. It stays registered until its session
        expires."""
        self._running(bookie).kill()

    def terminate(self, bookie: BookieId, *, timeout_s: float = TERMINATE_TIMEOUT_S) -> bool:
        """Stop the bookie as systemd would: SIGTERM, then SIGKILL after the timeout. Return True if
        SIGTERM was enough.

        A bookie that has only just started may hang in its shutdown forever (seen with 4.18.0).
        """
        child = self._running(bookie)
        child.terminate()
        if child.wait(timeout_s=timeout_s):
            return True
        child.kill()
        return False

    def start_bookie(self, bookie: BookieId) -> None:
        """Start the bookie again with its id and data. A bookie that was killed waits until its old
        session has expired."""
        self.start_bookies([bookie])

    def start_bookies(self, bookies: Sequence[BookieId]) -> None:
        """Start several bookies at the same time, as ``start_bookie`` does."""
        with self.session() as tree:
            for bookie in bookies:
                if self.pid(bookie) is not None:
                    raise SettingsError(f"bookie {bookie} is running already")
                if self._is_dismissed(bookie, tree):
                    wipe = f"bookmender local wipe {port_of(bookie)}{folder.data_option(self.data)}"
                    raise SettingsError(
                        f"bookie {bookie} has data but no cookie, for example because it was "
                        f"decommissioned. To start it as an empty bookie, run this first: {wipe}"
                    )
        self._start_bookies(bookies)

    def pause(self, bookie: BookieId) -> None:
        """Freeze the bookie (SIGSTOP): it answers no request, and its session expires."""
        self._running(bookie).pause()

    def resume(self, bookie: BookieId) -> None:
        self._running(bookie).resume()

    def wipe(self, bookie: BookieId) -> None:
        """Kill the bookie and delete its data and its cookie. It can start again as an empty
        bookie."""
        if self.pid(bookie) is not None:
            self.kill(bookie)
        shutil.rmtree(self._servers.bookie_folder(bookie), ignore_errors=True)
        with self.session() as tree:
            tree.delete_cookie(bookie)

    def add_bookie(self) -> BookieId:
        """Start an additional, empty bookie."""
        (port,) = ports.free_ports(1)
        self._spec = replace(self._spec, bookie_ports=(*self._spec.bookie_ports, port))
        self._spec.save(self._servers.data)
        self._start_bookies([bookie_id(port)])
        return bookie_id(port)

    def kill_zookeeper(self) -> None:
        if self._zookeeper is not None:
            self._zookeeper.kill()

    def restart_zookeeper(self) -> None:
        """Kill ZooKeeper if it runs, start it with its data, and return when it answers."""
        self.kill_zookeeper()
        self._start_zookeeper()

    def start_autorecovery(
        self,
        name: str = "autorecovery",
        *,
        settings: Mapping[str, str] | None = None,
    ) -> Child:
        """Start Java's AutoRecovery daemon. Returns at once; the daemon is ready when its vote is
        in ZooKeeper."""
        (port,) = ports.free_ports(1)
        child = self._servers.autorecovery(self._spec, name, port=port, settings=settings or {})
        self._autorecoveries.append(child)
        return child

    def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop all processes, ZooKeeper last. Acknowledged entries are kept. May be called
        repeatedly."""
        stop_all([*self._autorecoveries, *self._bookies.values()], timeout_s=timeout_s)
        if self._zookeeper is not None:
            stop_all([self._zookeeper], timeout_s=timeout_s)
        first = self._bookies.get(self.bookies[0])
        if self._was_ready and first is not None and not first.was_killed:
            self._servers.keep_archive(self._spec)
        self.release()

    def release(self) -> None:
        """Close the lock of the folder. The servers of a detached cluster still hold it."""
        if self._lock is not None:
            self._lock.close()

    def wait(self) -> None:
        """Wait for the end of ZooKeeper."""
        assert self._zookeeper is not None
        while not self._zookeeper.wait(timeout_s=READY_TIMEOUT_S):
            pass

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def _secured_spec(self) -> ClusterSpec:
        """The spec with the settings of TLS and SASL, which are not saved: they name files."""
        return self._spec if self.secrets is None else self.secrets.secure(self._spec)

    def _is_dismissed(self, bookie: BookieId, tree: znodes.Znodes) -> bool:
        """Return True if the bookie has data but no cookie, as after ``bookie decommission``. It
        would refuse to start.

        A bookie with a cookie and without data was wiped while the cluster was down. It would
        refuse to start as well, so this method deletes its cookie: the bookie starts as a new one.
        """
        if self._servers.has_data(bookie):
            return not tree.has_cookie(bookie)
        tree.delete_cookie(bookie)
        return False

    def _start_zookeeper(self) -> None:
        port = self._spec.zookeeper_port
        self._zookeeper = self._servers.zookeeper(self._secured_spec)
        wait_until(
            lambda: servers.is_zookeeper_ready(port), [self._zookeeper], timeout_s=READY_TIMEOUT_S
        )
        self._on_event(f"ZooKeeper on {self.zookeeper_address} is ready")

    def _start_bookies(self, bookies: Sequence[BookieId]) -> None:
        """Start the bookies at the same time. A bookie is ready when it has a new registration and
        answers requests.

        A bookie that was killed waits for the end of its old session, at most as long as a session
        lasts. If ZooKeeper ends the session a moment later, the bookie shuts down and hangs (seen
        with 4.18.0). So the old registration is deleted in time.
        """
        began_s = time.monotonic()
        with self.session() as tree:
            former = {bookie: tree.registration(bookie) for bookie in bookies}
            for bookie in bookies:
                self._bookies[bookie] = self._servers.bookie(self._secured_spec, bookie)

            def is_ready(bookie: BookieId) -> bool:
                registration = tree.registration(bookie)
                if registration is not None and registration == former[bookie]:
                    if time.monotonic() - began_s > self._spec.session_timeout_s:
                        tree.delete_registration(bookie)
                    return False
                return registration is not None and servers.is_bookie_ready(port_of(bookie))

            restarts_left = RESTARTS_MAX
            for bookie in bookies:
                while True:
                    try:
                        wait_until(
                            partial(is_ready, bookie),
                            [self._bookies[each] for each in bookies],
                            timeout_s=self._spec.session_timeout_s + READY_TIMEOUT_S,
                        )
                        break
                    except UnavailableError:
                        if not (restarts_left and self._restart_cut_off(bookies)):
                            raise
                        restarts_left -= 1
                self._on_event(f"bookie {bookie} is ready")

    def _restart_cut_off(self, bookies: Sequence[BookieId]) -> bool:
        """Start the bookies again that ended because ZooKeeper did not answer in time. Return False
        if none did."""
        ended = [bookie for bookie in bookies if not self._bookies[bookie].is_running]
        cut_off = [bookie for bookie in ended if CUT_OFF in self._bookies[bookie].log_tail()]
        for bookie in cut_off:
            self._on_event(f"bookie {bookie} got no answer of ZooKeeper, and is started again")
            self._bookies[bookie].wait(timeout_s=STOP_TIMEOUT_S)  # releases its resources
            self._bookies[bookie] = self._servers.bookie(self._secured_spec, bookie)
        return bool(cut_off)

    def _running(self, bookie: BookieId) -> Child:
        if self.pid(bookie) is None:
            raise SettingsError(f"bookie {bookie} is not running")
        return self._bookies[bookie]


def _check_ports(spec: ClusterSpec) -> None:
    """Raise SettingsError if another process uses a port of the cluster."""
    users = {spec.zookeeper_port: "ZooKeeper", spec.zookeeper_tls_port: "ZooKeeper with TLS"}
    users |= {port_of(bookie): f"bookie {bookie}" for bookie in spec.bookies}
    for port, server in users.items():
        if port is not None and not ports.is_free(port):
            # The port of a bookie is part of its id, so it cannot be changed.
            option = "port (--port)" if port == spec.zookeeper_port else "folder (--data)"
            raise SettingsError(
                f"port {port} of {server} is used by another process. End that process, or choose "
                f"another {option}."
            )
