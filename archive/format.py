"""The files of an archive, and what is in them.

An archive is a chain of files with ascending numbers. Each file names the SHA-256 of the file
before it, and ends with its own. So a file that is missing, cut or changed is found, and two
writers cannot both add the next file (``places``). There are three kinds:

- A *segment* has what changed after one checkpoint of the feed, up to another.
- A *page* has a part of the state that a base consists of.
- A *base* ends the pages of a base. Only with it do they count.

While changes go on, two segments a second are written. So the archiver later puts 64 files, byte
for byte, into one: a *pack*. A pack has no number and is no part of the chain.

A *record* is one object: a ledger, or another znode. The record with the highest version is the
latest. A deleted object has a record without data.
"""

from __future__ import annotations

import enum
import hashlib
import re
import struct
import zlib
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from checkpoints.model import CheckpointId, Key, LogId, Version, ledger_id_of, ledger_key
from ledgers.errors import CorruptionError
from ledgers.typed import decode_json, decode_msgpack

FORMAT: Final = 1
RECORDS_MAX: Final = 8_000
"""Records of one file."""
DATA_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of records in one file, unless a single record is larger."""
SHA_BYTES: Final = 32
FILE_BYTES_MAX: Final = 64 * 1024 * 1024
"""A file that would unpack to more is no file of an archive."""
FILES_OF_PACK: Final = 64
PACK_BYTES_MAX: Final = 8 * 1024 * 1024
"""Files that are larger together are not packed. A pack is read and written in memory."""
_MAGIC: Final = b"metadata archive\n"
_LENGTH = struct.Struct(">I")
_NAME = re.compile(r"([0-9]{12})(?:-([0-9]{12}))?\.bma")


class Record(Struct, frozen=True, array_like=True, gc=False):
    """An object at one version. ``version``: the zxid of its last change. ``data``: the bytes of
    its znode; None if it was deleted."""

    key: Key
    version: Version
    data: bytes | None

    @property
    def ledger_id(self) -> int | None:
        """The ledger; None if the object is another znode."""
        return ledger_id_of(self.key)

    @property
    def path(self) -> str | None:
        """The path of another znode: relative to the ledgers root, or absolute if it is not below
        it. None if the object is a ledger."""
        return self.key[1:].decode() if self.key.startswith(b"Z") else None

    def __repr__(self) -> str:  # without the data, which may hold a ledger's password
        return f"Record({self.key!r}, {self.version:#x})"


def znode_key(path: str) -> Key:
    """Return the key of a znode that is no ledger. ``path``: as ``Record.path``."""
    return b"Z" + path.encode()


class FileKind(enum.Enum):
    SEGMENT = "segment"
    PAGE = "page"
    BASE = "base"
    PACK = "pack"


class Header(Struct, frozen=True, kw_only=True):
    """The header of a file.

    ``number``: of the file, from 1. ``previous``: SHA-256 of the file before, hexadecimal; empty
    for the first. ``generation``: of the feed; checkpoints of different generations have nothing in
    common. ``begin``, ``end``: of a segment, the checkpoints that it begins after and ends with; of
    a base, the checkpoints before and after its pages were read. ``time_ms``: of the checkpoint
    ``end``, wall clock of the leader. ``is_exact``: False if a ledger changed again before its
    metadata was read, so that the state at ``end`` has a later version of it. A segment that ends
    where it begins is a part of the one that follows. ``first_page``: of a page or base, the number
    of the first page. ``total_count``: of a base, the records of its pages. ``base``: the number of
    the newest base before this file; 0 for none. ``since_base``: records of segments since then.
    ``log``: the ledger of the feed's log that has the checkpoint ``end``. ``root``: the path of the
    ledgers root. ``cluster``: its instance id; empty if it has none. Of a pack, only two count:
    ``number``, which is that of its first file, and ``sizes``, the bytes of each of its files.
    """

    format: int = FORMAT
    kind: FileKind
    number: int
    previous: str
    generation: int
    begin: CheckpointId
    end: CheckpointId
    time_ms: int
    is_exact: bool = True
    record_count: int = 0
    first_page: int = 0
    total_count: int = 0
    base: int = 0
    since_base: int = 0
    log: LogId | None = None
    root: str = "/ledgers"
    cluster: str = ""
    writer: str = ""
    sizes: tuple[int, ...] = ()


class Confirmed(Struct, frozen=True, kw_only=True):
    """The content of the file ``latest.json``, which is replaced while nothing changes: up to this
    time, nothing changed after the checkpoint, whose segment is the file ``number`` or earlier."""

    number: int
    time_ms: int
    generation: int
    checkpoint: CheckpointId


LATEST: Final = "latest.json"


def file_name(number: int) -> str:
    return f"{number:012d}.bma"


def block_of(number: int) -> int:
    """Return the block of a file. The files of a block, from 0, may be in a pack."""
    return (number - 1) // FILES_OF_PACK


def files_of(block: int) -> range:
    return range(block * FILES_OF_PACK + 1, (block + 1) * FILES_OF_PACK + 1)


def pack_name(block: int) -> str:
    numbers = files_of(block)
    return f"{numbers[0]:012d}-{numbers[-1]:012d}.bma"


def numbers_of(name: str) -> range:
    """Return the numbers of the files that are in a file, by its name; none if it is not ours."""
    match = _NAME.fullmatch(name)
    return range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)


def encode_file(header: Header, records: Sequence[Record]) -> bytes:
    """Return the bytes of a file, which end with their SHA-256."""
    packed = zlib.compress(msgspec.msgpack.encode(records), 6)
    return _encode(replace(header, record_count=len(records)), [packed])


def encode_pack(header: Header, files: Sequence[bytes]) -> bytes:
    """Return the bytes of a pack. They are compressed already, so the files follow each other.
    ``header``: of any of them."""
    numbers = files_of(block_of(header.number))
    sizes = tuple(map(len, files))
    return _encode(replace(header, kind=FileKind.PACK, number=numbers[0], sizes=sizes), files)


def _encode(header: Header, content: Sequence[bytes]) -> bytes:
    about = msgspec.json.encode(header)
    parts, digest = (_MAGIC, _LENGTH.pack(len(about)), about, *content), hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join((*parts, digest.digest()))


def decode_header(data: bytes, *, name: str) -> tuple[Header, str, slice]:
    """Return the header, the SHA-256 of the file, and where its content is: its records, or its
    files. ``name``: for errors. Raises CorruptionError if a byte is missing or was changed."""
    digest, start = data[-SHA_BYTES:], len(_MAGIC) + _LENGTH.size
    is_whole = hashlib.sha256(memoryview(data)[:-SHA_BYTES]).digest() == digest
    if not data.startswith(_MAGIC) or not is_whole:
        raise CorruptionError(
            "a file of the archive was cut or changed, or is none of ours", name=name
        )
    (length,) = _LENGTH.unpack(data[len(_MAGIC) : start])
    try:
        header = decode_json(data[start : start + length], Header)
    except ValueError as error:
        raise CorruptionError("unreadable header of an archive's file", name=name) from error
    if header.format != FORMAT:
        raise CorruptionError(
            f"the archive has format {header.format}, and this release reads {FORMAT}", name=name
        )
    return header, digest.hex(), slice(start + length, len(data) - SHA_BYTES)


def decode_records(packed: bytes, *, name: str) -> list[Record]:
    """Return the records of a file. Raises CorruptionError."""
    try:
        unpacker = zlib.decompressobj()
        unpacked = unpacker.decompress(packed, FILE_BYTES_MAX)
        if not unpacker.eof:
            raise CorruptionError("a file of the archive is incomplete or too large", name=name)
        return decode_msgpack(unpacked, list[Record])
    except (zlib.error, ValueError) as error:
        raise CorruptionError("unreadable records of an archive's file", name=name) from error


def ledger_record(ledger_id: int, *, version: Version, data: bytes | None) -> Record:
    return Record(ledger_key(ledger_id), version, data)
