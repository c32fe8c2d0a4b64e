"""Receipts in ZooKeeper: one znode for each client, with everything in it.

Each write replaces the znode by compare-and-set, so the epoch is checked together with it. Receipts
are merged at each write. The znode of a client that works in any order stays below a kilobyte,
unless checkpoints remain open between many that are complete.

Size: a record above RECORD_BYTES_MAX is not written, and the write raises QuotaError, a kind of
UnavailableError. The service repeats receipts, and meanwhile the client goes on: its receipts wait
in memory, where they merge. The write succeeds when the open checkpoints between them have
receipts. If the client dies before, it is given those changes again. A failure that does not fit is
an error of the client. About 10,000 separate ranges or 400
failures with long reasons fit. A client that needs more uses ``sql``.
"""

from __future__ import annotations

import asyncio
import random
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct

from checkpoints.errors import PositionUnknownError
from checkpoints.model import CheckpointId, Key, LogId, Version
from checkpoints.receipts import (
    DELETED,
    FENCED,
    ClientProcess,
    ClientSummary,
    Failure,
    RangeMerger,
    ReceiptRange,
    check_client_name,
    first_epoch,
)
from ledgers.errors import (
    ClientDeletedError,
    ClientFencedError,
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    QuotaError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.store import MetadataStore

RECORD_BYTES_MAX: Final = 512 * 1024
_TRIES_MAX: Final = 10
_OPEN_TRIES_MAX: Final = 100
_OPEN_WAIT_MAX_S: Final = 0.05


class ClientRecord(Struct, frozen=True, kw_only=True):
    """The content of a client's znode, as JSON.

    ``epoch``: grows each time that the store is opened (``first_epoch``). ``process``: the id of
    the process that opened it last (``ClientProcess``). ``generation``: of
    the feed; receipts of another feed mean nothing. ``was_reset``: receipts of an earlier feed were
    deleted. ``log``: the ledger of the log that the furthest receipt belongs to; an earlier release
    drops it. ``receipts``: lowest first; they neither overlap nor touch, and end after the low
    watermark. ``failures``: by ascending version.
    """

    format: int = 1
    epoch: int
    process: str = ""
    generation: int = 0
    was_reset: bool = False
    low_watermark: CheckpointId | None = None
    receipts: tuple[ReceiptRange, ...] = ()
    failures: tuple[Failure, ...] = ()
    log: LogId | None = None


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(ClientRecord)


def decode_client(data: bytes, *, path: str) -> ClientRecord:
    """Return the record in a client's znode. Raises CorruptionError."""
    try:
        record = _decoder.decode(data)
    except (ValueError, RecursionError) as error:
        raise CorruptionError("the record of a client is not readable", path=path) from error
    if record.format != 1:
        raise CorruptionError(
            "the record of a client has an unknown format", path=path, format=record.format
        )
    return record


def client_path(folder: str, client: str) -> str:
    """Return the path of a client's znode. The name is percent-encoded. Raises SettingsError."""
    check_client_name(client)
    return f"{folder}/{urllib.parse.quote(client, safe='')}"


class ZooKeeperReceiptStore:
    """A ``ReceiptStore`` in one znode. Lives as long as the session of ``store``."""

    def __init__(
        self, store: MetadataStore, path: str, epoch: int, *, was_reset: bool = False
    ) -> None:
        self._store, self._path, self._epoch = store, path, epoch
        self.was_reset = was_reset
        """True if receipts of an earlier feed were deleted, and none was stored since."""

    @classmethod
    async def open(
        cls,
        store: MetadataStore,
        *,
        folder: str,
        client: str,
        generation: int = 0,
        process: ClientProcess | None = None,
        is_restored: bool = False,
    ) -> ZooKeeperReceiptStore:
        """Return the store of a client, and fence the process that opened it before.

        ``folder``: the parent of all clients' znodes; it is created if it does not exist.
        ``generation``: of the feed; receipts of an earlier feed are deleted. ``process``: who opens
        the store; None: a new process. ``is_restored``: this process has followed checkpoints that
        the feed does not have, so the receipts are deleted, and no record proves no deletion of the
        client. Receipts are also deleted if the record is older than this process: ZooKeeper was
        restored from a backup.
        ``store`` stays the caller's. Raises UnavailableError,
        CorruptionError, SettingsError, ClientFencedError, and ConflictError if the client has
        receipts of a later feed.
        """
        path = client_path(folder, client)
        process = process or ClientProcess()
        for number in range(_OPEN_TRIES_MAX):
            if number > 0:
                # A process that writes all the time must not win every race: the waits differ.
                await asyncio.sleep(random.uniform(0, _OPEN_WAIT_MAX_S))
            try:
                data, stat = await store.get(path)
            except NoNodeError:
                if process.has_opened and not is_restored:
                    raise _deleted(path) from None
                record = ClientRecord(
                    epoch=first_epoch(),
                    process=process.id,
                    generation=generation,
                    was_reset=is_restored,
                )
                try:
                    await store.create(path, _encode(record), with_parents=True)
                except NodeExistsError:
                    continue
                process.epoch = record.epoch
                return cls(store, path, record.epoch, was_reset=is_restored)
            record = decode_client(data, path=path)
            if process.is_fenced_by(epoch=record.epoch, process=record.process):
                raise _fenced(path)
            is_older = is_restored or process.is_after(record.epoch)
            if record.generation > generation:
                raise ConflictError("this client follows a later feed", path=path)
            epoch = max(record.epoch, process.epoch or 0) + 1
            if record.generation == generation and not is_older:
                record = msgspec.structs.replace(record, epoch=epoch, process=process.id)
            else:
                record = ClientRecord(
                    epoch=epoch,
                    process=process.id,
                    generation=generation,
                    was_reset=is_older or record.was_reset or record.low_watermark is not None,
                )
            was_reset = record.was_reset and record.low_watermark is None
            try:
                await store.set(path, _encode(record), version=stat.version)
            except (ConflictError, NoNodeError):
                continue
            process.epoch = epoch
            return cls(store, path, epoch, was_reset=was_reset)
        raise UnavailableError("the record of a client changes all the time", path=path)

    async def store_low_watermark(self, checkpoint_id: CheckpointId) -> None:
        def change(record: ClientRecord) -> ClientRecord:
            if record.low_watermark is not None and record.low_watermark >= checkpoint_id:
                return record
            receipts = tuple(each for each in record.receipts if each.end > checkpoint_id)
            return msgspec.structs.replace(record, low_watermark=checkpoint_id, receipts=receipts)

        await self._change(change)

    async def get_low_watermark(self) -> CheckpointId | None:
        return (await self._read())[0].low_watermark

    async def store_checkpoint_range_receipts(self, ranges: Sequence[ReceiptRange]) -> None:
        def change(record: ClientRecord) -> ClientRecord:
            low_watermark = record.low_watermark or 0
            new = (each for each in ranges if each.end > low_watermark)
            merger = RangeMerger(sorted((*record.receipts, *new), reverse=True))
            receipts = tuple(merger.ranges)
            return msgspec.structs.replace(record, receipts=receipts)

        await self._change(change)

    async def get_checkpoint_range_receipts(
        self, antecedent: CheckpointId
    ) -> AsyncGenerator[ReceiptRange, None]:
        for each in reversed((await self._read())[0].receipts):
            if each.end > antecedent:
                yield each

    async def purge_checkpoint_receipts(self, ranges: Sequence[ReceiptRange]) -> None:
        def change(record: ClientRecord) -> ClientRecord:
            receipts = tuple(
                each
                for each in record.receipts
                if not any(purged.contains(each) and purged != each for purged in ranges)
            )
            return msgspec.structs.replace(record, receipts=receipts)

        await self._change(change)

    async def store_failure(self, failure: Failure) -> None:
        def change(record: ClientRecord) -> ClientRecord:
            if any(
                each.key == failure.key and each.version > failure.version
                for each in record.failures
            ):
                return record
            others = (each for each in record.failures if each.key != failure.key)
            failures = sorted((*others, failure), key=lambda each: each.version)
            return msgspec.structs.replace(record, failures=tuple(failures))

        await self._change(change)

    async def get_failures(self) -> Sequence[Failure]:
        return (await self._read())[0].failures

    async def delete_failure(self, key: Key, *, up_to: Version) -> None:
        def change(record: ClientRecord) -> ClientRecord:
            kept = (each for each in record.failures if each.key != key or each.version > up_to)
            return msgspec.structs.replace(record, failures=tuple(kept))

        await self._change(change)

    async def store_log(self, log_id: LogId) -> None:
        await self._change(lambda record: msgspec.structs.replace(record, log=log_id))

    async def get_log(self) -> LogId | None:
        return (await self._read())[0].log

    async def reset(self) -> None:
        def change(record: ClientRecord) -> ClientRecord:
            return ClientRecord(
                epoch=record.epoch,
                process=record.process,
                generation=record.generation,
                was_reset=True,
            )

        await self._change(change)

    async def close(self) -> None:
        """Do nothing: the session is the caller's."""

    async def _change(self, change: Callable[[ClientRecord], ClientRecord]) -> None:
        """Apply a change to the record, by compare-and-set.

        A conflict comes from a write of our own whose reply was lost, or from the process that
        fences this one. Both show in the record.
        """
        for _ in range(_TRIES_MAX):
            record, version = await self._read()
            changed = change(record)
            if changed == record:
                return
            data = _encode(changed)
            if len(data) > RECORD_BYTES_MAX:
                raise QuotaError(
                    "the record of a client is too large for ZooKeeper",
                    path=self._path,
                    record_bytes=len(data),
                    bytes_max=RECORD_BYTES_MAX,
                )
            try:
                await self._store.set(self._path, data, version=version)
            except ConflictError:
                continue
            except NoNodeError:
                raise _deleted(self._path) from None
            return
        raise UnavailableError("the record of a client changes all the time", path=self._path)

    async def _read(self) -> tuple[ClientRecord, int]:
        """Return the record, and the version of its znode."""
        try:
            data, stat = await self._store.get(self._path)
        except NoNodeError:
            raise _deleted(self._path) from None
        record = decode_client(data, path=self._path)
        if record.epoch < self._epoch:  # no later process: the record is from a backup
            raise PositionUnknownError(path=self._path)
        if record.epoch > self._epoch:
            raise _fenced(self._path)
        return record, stat.version


def _fenced(path: str) -> ClientFencedError:
    return ClientFencedError(FENCED, path=path)


def _deleted(path: str) -> ClientDeletedError:
    return ClientDeletedError(DELETED, path=path)


class ZooKeeperClientTable:
    """A ``ClientTable`` of the znodes in a folder. ``store`` stays the caller's."""

    def __init__(self, store: MetadataStore, *, folder: str) -> None:
        self._store, self._folder = store, folder

    async def list(
        self, *, count_max: int | None = None, skip_unreadable: bool = False
    ) -> Sequence[ClientSummary]:
        """``count_max``: return only so many, the first by name. Raises CorruptionError or
        UnauthorizedError if a record is unreadable and ``skip_unreadable`` is False."""
        try:
            names = await self._store.children(self._folder)
        except NoNodeError:
            return ()
        found = []
        for name in sorted(names)[:count_max]:
            with suppress(*((CorruptionError, UnauthorizedError) if skip_unreadable else ())):
                found.append(await self.find(urllib.parse.unquote(name)))
        return [each for each in found if each is not None]

    async def find(self, name: str) -> ClientSummary | None:
        path = client_path(self._folder, name)
        try:
            data, _ = await self._store.get(path)
        except NoNodeError:
            return None
        record = decode_client(data, path=path)
        return ClientSummary(
            name=name,
            generation=record.generation,
            low_watermark=record.low_watermark,
            receipt_count=len(record.receipts),
            failures=record.failures,
        )

    async def delete(self, name: str) -> bool:
        try:
            await self._store.delete(client_path(self._folder, name))
        except NoNodeError:
            return False
        return True

    async def order_retries(self, name: str) -> int:
        path = client_path(self._folder, name)
        for _ in range(_OPEN_TRIES_MAX):
            try:
                data, stat = await self._store.get(path)
                record = decode_client(data, path=path)
                failures = tuple(
                    msgspec.structs.replace(each, is_retry_ordered=True) for each in record.failures
                )
                changed = msgspec.structs.replace(record, failures=failures)
                await self._store.set(path, _encode(changed), version=stat.version)
            except NoNodeError:
                return 0
            except ConflictError:
                await asyncio.sleep(random.uniform(0, _OPEN_WAIT_MAX_S))
                continue
            return len(failures)
        raise UnavailableError("the record of a client changes all the time", path=path)

    async def close(self) -> None:
        """Do nothing: the session is the caller's."""
