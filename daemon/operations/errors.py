"""Errors of operations that say that a request is wrong, not the cluster."""

from ledgers.errors import BookmenderError


class UnknownBookieError(BookmenderError):
    """The cluster knows no such bookie."""
