"""A request that reads several znodes. kazoo (as of 2.11) only reads them one by one.

ZooKeeper's multiRead (3.6, opcode 22) is framed like a transaction, but is not atomic: a read that
fails does not fail the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kazoo.exceptions import EXCEPTIONS
from kazoo.protocol.serialization import (
    GetData,
    int_struct,
    multiheader_struct,
    read_buffer,
    stat_struct,
    write_string,
)
from kazoo.protocol.states import ZnodeStat

_PART = multiheader_struct.pack(GetData.type, False, -1)
_END = multiheader_struct.pack(-1, True, -1)
_NO_WATCH = b"\0"
_ERROR = -1


@dataclass(frozen=True, slots=True)
class MultiRead:
    """Request for the data of several znodes. The reply is a list in the same order.

    Each element is the result of kazoo's ``GetData`` (data, ZnodeStat), or the exception that it
    would raise.
    """

    type: ClassVar[int] = 22

    paths: Sequence[str]

    def serialize(self) -> bytes:
        parts = (_PART + write_string(path) + _NO_WATCH for path in self.paths)
        return b"".join((*parts, _END))

    @classmethod
    def deserialize(cls, reply: bytes, offset: int) -> list[Any]:
        parts: list[Any] = []
        while True:
            kind, is_end, _ = multiheader_struct.unpack_from(reply, offset)
            offset += multiheader_struct.size
            if is_end:
                return parts
            if kind == _ERROR:
                (code,) = int_struct.unpack_from(reply, offset)
                offset += int_struct.size
                parts.append(EXCEPTIONS[code]())
            else:
                data, offset = read_buffer(reply, offset)
                parts.append((data, ZnodeStat._make(stat_struct.unpack_from(reply, offset))))
                offset += stat_struct.size
