"""The under-replication queue, and the worker that takes ledgers from it and repairs them.

The way of a ledger: the ``worker`` takes it from the ``queue``; ``repair`` goes round by round:
``planning`` says what is missing and what goes where, ``copying`` does it, and one transaction writes
it. The ``outcome`` says what became of it, for which of the ``reasons``; what must wait goes to
``waiting``. ``recent_copies`` records new copies, to be read again later. ``slots``: how many go at once; ``summary``: what was done. ``cluster``: who is there, and
what operators want. ``given_up``: entries that an operator gave up. ``restoring``: a write undone from the ``journal``. ``settings``: what an
operator may set of all this.
"""
