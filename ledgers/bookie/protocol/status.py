"""The bookies' status codes in one table, and the one error that each of them becomes.

What decides is what a caller may conclude (rule S5). Only ENOLEDGER and ENOENTRY say that an entry
is not there. Whatever proves nothing becomes ``UnavailableError``: disk trouble, a ledger in limbo
after an unclean shutdown, a request that the bookie stumbled over, and any code that we do not
know. Source: BookieProtocol (V2) and BookkeeperProtocol.StatusCode (V3).
"""

import enum
from typing import Final

from ledgers.errors import (
    BookmenderError,
    BusyError,
    FencedError,
    NoSuchEntryError,
    ReadOnlyError,
    UnauthorizedError,
    UnavailableError,
    UnreadableError,
)


class Status(enum.Enum):
    """Each with its code in V2, its code in V3, and its error. ``UNKNOWN`` has no code."""

    EOK = (0, 0, None)
    ENOLEDGER = (1, 402, NoSuchEntryError)
    ENOENTRY = (2, 403, NoSuchEntryError)
    EBADREQ = (100, 404, UnavailableError)  # also any unexpected exception inside the bookie
    EIO = (101, 501, UnreadableError)
    EUA = (102, 502, UnauthorizedError)
    EBADVERSION = (103, 503, UnavailableError)
    EFENCED = (104, 504, FencedError)
    EREADONLY = (105, 505, ReadOnlyError)
    ETOOMANYREQUESTS = (106, 506, BusyError)
    EUNKNOWNLEDGERSTATE = (107, 507, UnavailableError)
    UNKNOWN = (None, None, UnavailableError)

    def __init__(
        self, v2_code: int | None, v3_code: int | None, error: type[BookmenderError] | None
    ) -> None:
        self.v2_code = v2_code
        self.v3_code = v3_code
        self.error = error

    @classmethod
    def of_v2(cls, code: int) -> "Status":
        return _BY_V2_CODE.get(code, cls.UNKNOWN)

    @classmethod
    def of_v3(cls, code: int) -> "Status":
        return _BY_V3_CODE.get(code, cls.UNKNOWN)


_BY_V2_CODE: Final = {status.v2_code: status for status in Status if status.v2_code is not None}
_BY_V3_CODE: Final = {status.v3_code: status for status in Status if status.v3_code is not None}
