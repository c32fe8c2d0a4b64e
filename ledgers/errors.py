"""All errors, sorted by what the caller does next, not by where they arise.

Every error raised on purpose is a ``BookmenderError``. Three questions decide its class: May the
same call succeed later (``UnavailableError``)? Did the peer understand and refuse
(``RejectedError``)? Is the data itself wrong (``CorruptionError``)?
"""

import errno
import os


class BookmenderError(Exception):
    """Base of all errors raised on purpose. ``context``: ids that a reader of the log needs."""

    def __init__(self, message: str, **context: object) -> None:
        super().__init__(message)
        self.context = context
        if context:
            self.add_note(", ".join(f"{key}={value}" for key, value in context.items()))

    def __str__(self) -> str:
        message = super().__str__()
        if not self.context:
            return message
        return f"{message} ({', '.join(f'{key}={value}' for key, value in self.context.items())})"


# --- The peer could not answer now: wait, try again, perhaps elsewhere -------------------------


class UnavailableError(BookmenderError):
    """A bookie or ZooKeeper could not answer now. Says nothing about what is stored there."""


class UnprovenEndError(UnavailableError):
    """The end of a ledger cannot be proven, because bookies may have lost entries.
    ``has_unresponsive``: True if a bookie, which may still have them, did not answer."""

    def __init__(self, message: str, *, has_unresponsive: bool, **context: object) -> None:
        super().__init__(message, **context)
        self.has_unresponsive = has_unresponsive


class DamagedEndError(UnavailableError):
    """No bookie returns a good copy of an entry at the end of an open ledger, and some a damaged
    one. The entry may be acknowledged, so that only an operator can give it up."""


class NoAnswerError(UnavailableError):
    """The bookie could not be connected to, or did not reply. The next request may fail, too."""


class NameNotResolvedError(NoAnswerError):
    """The host name of the bookie does not resolve in time."""


class SecureConnectionError(NoAnswerError):
    """TLS or authentication with a bookie or ZooKeeper failed. Every try fails until certificates,
    passwords or settings are corrected."""


class AuthenticationRequiredError(SecureConnectionError):
    """The bookie requires authentication: it replied EUA to a request without master key."""


class BusyError(UnavailableError):
    """The bookie asked us to slow down (ETOOMANYREQUESTS)."""


class UnreadableError(UnavailableError):
    """The bookie could not read from its disk (EIO). Says nothing about other bookies."""


class UnknownOutcomeError(UnavailableError):
    """The reply to a write was lost, so the write may have happened. Read before going on."""


class JournalError(UnavailableError):
    """The local journal could not record the metadata to be overwritten. Nothing was written."""


class QuotaError(UnavailableError):
    """The ZooKeeper quota of the path is exhausted, until it is raised or znodes are deleted."""


class LocalLimitError(UnavailableError):
    """No further file can be opened, or thread started. The peer was not asked."""

    @classmethod
    def of(cls, error: BaseException) -> "LocalLimitError | None":
        """Return the error to be raised in place of this one; None if it has another reason."""
        match error:
            case OSError(errno=errno.EMFILE):
                step = "raise its limit of open files (LimitNOFILE of systemd, ulimit -n)"
                return cls(f"this process can open no further file: {step}")
            case OSError(errno=errno.ENFILE):
                return cls("this host can open no further file: raise fs.file-max")
            case RuntimeError() if "start new thread" in str(error):
                step = "raise its limit (TasksMax of systemd, ulimit -u, the pids of a container)"
                return cls(f"this process can start no further thread: {step}")
        return None

    @classmethod
    def now(cls) -> "LocalLimitError | None":
        """Try to open a file, and return the error if that is impossible. For callers of the C
        library: ``getaddrinfo`` then says that a name does not exist."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            return cls.of(error)
        return None


class NotEnoughBookiesError(UnavailableError):
    """The placement rules allow none of the remaining bookies."""


# --- Locks or session are lost: unwind ---------------------------------------------------------


class SessionLostError(BookmenderError):
    """The ZooKeeper session is lost, and with it its ephemeral znodes: locks, vote, registration.
    Not an ``UnavailableError``: no retry within the session can succeed. The service restarts."""


class LockLostError(BookmenderError):
    """The lock on a ledger is lost. Discard the work done under it, and write nothing more."""


class ClientFencedError(BookmenderError):
    """Another process took over the receipts of this client and follows the feed: end this one."""


class ClientDeletedError(ClientFencedError):
    """The client was deleted, with all of its receipts. It must not go on as if it had them."""


# --- The peer understood and refused: a retry gets the same answer -----------------------------


class RejectedError(BookmenderError):
    """The peer understood and refused. A retry gets the same answer."""


class UnsupportedError(RejectedError):
    """The release of the peer does not support the request."""


class NoSuchEntryError(RejectedError):
    """The bookie does not store the entry or its ledger. The only "no" (rule S5)."""


class FencedError(RejectedError):
    """The ledger is fenced on this bookie, or the bookie deleted its copy of it (EFENCED)."""


class UnauthorizedError(RejectedError):
    """Access denied: the bookie knows another master key, or an ACL of ZooKeeper denies access."""


class ReadOnlyError(RejectedError):
    """The bookie is read-only (EREADONLY)."""


class NoSuchLedgerError(RejectedError):
    """The metadata store has no such ledger: it was deleted or never created."""


class LedgerClosedError(RejectedError):
    """Another client closed the ledger or recovers it. This writer can add nothing more."""


class NotSharedError(RejectedError):
    """A receipt names a version of an object that no checkpoint has contained so far."""


class NoNodeError(RejectedError):
    """The znode does not exist."""


class NodeExistsError(RejectedError):
    """The znode already exists."""


class NotEmptyError(RejectedError):
    """The znode has children and cannot be deleted."""


class ConflictError(RejectedError):
    """The version of the znode changed since it was read. Read again and decide again."""


# --- Leadership is lost ------------------------------------------------------------------------


class LeadershipLostError(BookmenderError):
    """This node can no longer prove its leadership. Unwind, and write nothing more."""


# --- No correct peer produces this: leave the ledger alone, and report it ----------------------


class CorruptionError(BookmenderError):
    """The data cannot come from a correct peer. No decision is based on it."""


class DigestMismatchError(CorruptionError):
    """The entry does not match its digest, or is not the requested entry (rule S7)."""


# --- Wrong input of a user ---------------------------------------------------------------------


class SettingsError(BookmenderError):
    """A setting, argument or URI is not allowed. The message names it and the allowed values.
    ``setting``: the full key (``section.key``)."""

    def __init__(self, message: str, *, setting: str | None = None, **context: object) -> None:
        super().__init__(message, **context)
        self.setting = setting

    @classmethod
    def not_allowed(cls, setting: str, value: object, allowed: str) -> "SettingsError":
        return cls(f"{setting} is {value!r}; allowed: {allowed}", setting=setting)
