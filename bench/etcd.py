"""An etcd server on loopback, the peer of the change feed, and a client of it over gRPC.

etcd keeps every revision of its keys, and a watch from an old revision replays them. That is how a
program that follows etcd catches up.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import grpc

from bench.etcd_pb2 import (
    Event,
    PutRequest,
    PutResponse,
    RangeRequest,
    RangeResponse,
    WatchCreateRequest,
    WatchRequest,
    WatchResponse,
)
from daemon.local.ports import LOOPBACK, free_ports
from daemon.local.processes import Child, wait_until
from ledgers.errors import SettingsError, UnavailableError

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0
PUTS_AT_ONCE = 500
QUOTA_BYTES = 4 << 30
PREFIX = b"/ledgers/"
PREFIX_END = b"/ledgers0"
"""The first key after all that begin with the prefix."""
OPTIONS = [("grpc.max_receive_message_length", -1)]
HOW_TO_INSTALL = (
    "Install it (Debian: apt-get install etcd-server), or only unpack it: "
    "apt-get download etcd-server && dpkg-deb -x etcd-server_*.deb etcd, "
    "and pass --etcd etcd/usr/bin/etcd"
)

OnChange = Callable[[bytes, int, bool], None]
"""Receives the key of a change, its revision, and whether the key was deleted."""


def find_etcd(path: Path | None = None) -> Path:
    """Return the server's program. Raises SettingsError if there is none."""
    found = shutil.which(path or "etcd")
    if found is None:
        raise SettingsError(f"etcd is needed as the peer of the feed. {HOW_TO_INSTALL}")
    return Path(found)


@contextmanager
def running_etcd(folder: Path, program: Path) -> Iterator[str]:
    """Run a server with its defaults, and yield ``host:port``. Raises UnavailableError."""
    client, peer = (f"{LOOPBACK}:{port}" for port in free_ports(2))
    command = [
        *(str(program), "--name", "bench", "--data-dir", str(folder / "etcd")),
        *(
            "--listen-client-urls",
            f"http://{client}",
            "--advertise-client-urls",
            f"http://{client}",
        ),
        *(
            "--listen-peer-urls",
            f"http://{peer}",
            "--initial-advertise-peer-urls",
            f"http://{peer}",
        ),
        *("--initial-cluster", f"bench=http://{peer}", "--logger", "zap"),
        *("--quota-backend-bytes", str(QUOTA_BYTES)),
    ]
    child = Child("etcd", command, log=folder / "etcd.log")
    try:
        wait_until(lambda: _answers(client), [child], timeout_s=START_TIMEOUT_S)
        yield client
    finally:
        child.kill()


def _answers(address: str) -> bool:
    try:
        EtcdClient(address).revision()
    except grpc.RpcError:
        return False
    return True


class EtcdClient:
    """One connection. Its calls block."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=OPTIONS)

    def close(self) -> None:
        self._channel.close()

    def revision(self) -> int:
        """Return the present revision of the store."""
        return self._range(RangeRequest(key=PREFIX)).header.revision

    def watch(self, first_revision: int, last_revision: int, on_change: OnChange) -> None:
        """Report each change of the keys below the prefix in these revisions, inclusive at both
        ends. Raises UnavailableError."""
        watch = self._channel.stream_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=WatchRequest.SerializeToString,
            response_deserializer=WatchResponse.FromString,
        )
        create = WatchCreateRequest(key=PREFIX, range_end=PREFIX_END, start_revision=first_revision)
        responses = watch(iter([WatchRequest(create_request=create)]))
        for response in responses:
            if response.canceled:
                raise UnavailableError(f"etcd ended the watch: {response.cancel_reason}")
            for event in response.events:
                pair = event.kv
                on_change(pair.key, pair.mod_revision, event.type == Event.DELETE)
            if response.events and response.events[-1].kv.mod_revision >= last_revision:
                break
        responses.cancel()

    def list_changed(self, first_revision: int, on_change: OnChange) -> None:
        """Report each key below the prefix whose last change is not before this revision. Deleted
        keys are not reported."""
        request = RangeRequest(key=PREFIX, range_end=PREFIX_END, min_mod_revision=first_revision)
        for pair in self._range(request).kvs:
            on_change(pair.key, pair.mod_revision, False)

    def put_all(self, pairs: Iterable[tuple[bytes, bytes]]) -> int:
        """Put each key in a revision of its own, and return the last revision."""
        put = self._channel.unary_unary(
            "/etcdserverpb.KV/Put",
            request_serializer=PutRequest.SerializeToString,
            response_deserializer=PutResponse.FromString,
        )
        last, pairs = 0, iter(pairs)
        while part := list(islice(pairs, PUTS_AT_ONCE)):
            flying = [
                put.future(PutRequest(key=key, value=value), timeout=ANSWER_TIMEOUT_S)
                for key, value in part
            ]
            for each in flying:
                response: PutResponse = each.result()
                last = max(last, response.header.revision)
        return last

    def _range(self, request: RangeRequest) -> RangeResponse:
        call = self._channel.unary_unary(
            "/etcdserverpb.KV/Range",
            request_serializer=RangeRequest.SerializeToString,
            response_deserializer=RangeResponse.FromString,
        )
        response: RangeResponse = call(request, timeout=ANSWER_TIMEOUT_S)
        return response
