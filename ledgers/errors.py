"""What can go wrong, sorted by what the caller does next rather than by where it arose.

Every error raised on purpose is a ``BookmenderError``. Three questions decide the class: may the
same call succeed later (``UnavailableError``), did the peer understand and refuse
(``RejectedError``), or is the data itself wrong (``CorruptionError``)?
"""


class BookmenderError(Exception):
    """Base of what we raise on purpose. ``context``: the ids a reader of the log needs."""

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


# --- It could not answer now: wait, try again, perhaps elsewhere -------------------------------


class UnavailableError(BookmenderError):
    """A bookie or ZooKeeper could not answer now. Says nothing about what is stored there."""


class UnprovenEndError(UnavailableError):
    """Where a ledger ends cannot be proven: bookies may have lost entries. Other bookies may know, or a person.

    ``are_any_silent``: some bookie of the ledger did not answer.
    """

    def __init__(self, message: str, *, are_any_silent: bool, **context: object) -> None:
        super().__init__(message, **context)
        self.are_any_silent = are_any_silent


class DamagedEndError(UnavailableError):
    """The end of an open ledger rests on an entry of which no bookie gives a good copy, and some give a damaged one.

    It may have been acknowledged, so a recovery does not pass over it. Only an operator can give it up.
    """


class NoAnswerError(UnavailableError):
    """The bookie could not be connected to, or stayed silent: it will probably do so again."""


class NameNotResolvedError(NoAnswerError):
    """The host name in a bookie's address does not resolve, or not in time."""


class AuthenticationRequiredError(NoAnswerError):
    """The bookie answers nobody who has not authenticated: it said EUA to a request that carries no master key."""


class BusyError(UnavailableError):
    """The bookie asked us to slow down (ETOOMANYREQUESTS)."""


class UnreadableError(UnavailableError):
    """The bookie has trouble with its disk (EIO). Says nothing about what other bookies store."""


class UnknownOutcomeError(UnavailableError):
    """The reply to a write was lost: it may or may not have happened. Read before going on."""


class JournalError(UnavailableError):
    """What is about to be overwritten could not be recorded on this host's disk: nothing was written."""


class QuotaError(UnavailableError):
    """ZooKeeper's quota of the path is used up: until somebody raises it, or something there is deleted."""


class NotEnoughBookiesError(UnavailableError):
    """No bookie is left that the placement rules allow."""


# --- What we held is not ours any more: unwind -------------------------------------------------


class SessionLostError(BookmenderError):
    """The ZooKeeper session is lost, and with it every ephemeral znode: our locks, our vote, our registration.

    No retry within the session can succeed, so this is no ``UnavailableError``: the service ends and starts again.
    """


class LockLostError(BookmenderError):
    """The lock on a ledger is no longer ours. Drop what was done under it, and write nothing more."""


# --- The peer understood and said no: it will say the same again ------------------------------


class RejectedError(BookmenderError):
    """The peer understood and said no; it will say the same again."""


class UnsupportedError(RejectedError):
    """The peer is of a release that does not know the request."""


class NoSuchEntryError(RejectedError):
    """The bookie explicitly does not have it (ENOENTRY, ENOLEDGER): the only answer that is a "no"."""


class FencedError(RejectedError):
    """The ledger is fenced on this bookie, or its copy was deleted there (EFENCED)."""


class UnauthorizedError(RejectedError):
    """The master key is not the one the bookie knows, or ZooKeeper's ACLs shut us out."""


class ReadOnlyError(RejectedError):
    """The bookie takes no writes (EREADONLY)."""


class NoSuchLedgerError(RejectedError):
    """The metadata store has no such ledger: it was deleted, or never was."""


class LedgerClosedError(RejectedError):
    """The ledger was closed, or is being recovered, by somebody else: this writer's days are over."""


class NoNodeError(RejectedError):
    """There is no such znode."""


class NodeExistsError(RejectedError):
    """There is such a znode already."""


class NotEmptyError(RejectedError):
    """The znode has children and so cannot be deleted."""


class ConflictError(RejectedError):
    """The znode is at another version than the decision was made from: read again, decide again."""


# --- We are not the one to do it any more ------------------------------------------------------


class LeadershipLostError(BookmenderError):
    """The election can no longer be proven ours: unwind, touch nothing more."""


# --- No correct peer produces this: leave the ledger alone, tell a person ----------------------


class CorruptionError(BookmenderError):
    """Bytes that no correct peer produces. Nothing is decided from them."""


class DigestMismatchError(CorruptionError):
    """The entry is not what its digest says, or is another entry than was asked for (rule S7)."""


# --- We were called wrongly --------------------------------------------------------------------


class SettingsError(BookmenderError):
    """A setting, argument or URI is not what is allowed. The message names it and what is.

    ``setting``: its full key, as ``section.key``, so that a reader can be told where it was set.
    """

    def __init__(self, message: str, *, setting: str | None = None, **context: object) -> None:
        super().__init__(message, **context)
        self.setting = setting

    @classmethod
    def not_allowed(cls, setting: str, value: object, allowed: str) -> "SettingsError":
        return cls(f"{setting} is {value!r}; allowed: {allowed}", setting=setting)
