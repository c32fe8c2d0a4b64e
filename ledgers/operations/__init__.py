"""What is done to a ledger: ``creation``, ``writer``, ``opening``, ``reader``, ``recovery`` with its
``fencing`` and its ``recovery_verdicts``, and the ``rescue`` of what is left where that proves no end.

They share ``appending`` (adds to a write set, with ``acks`` and ``ensembles``), ``asking`` (several
bookies for one answer), ``ahead`` (reads in advance) and ``tasks``. ``latecomers`` are bookies that a recovery does
not believe at once, ``last_entries`` is a guess at how far a ledger reaches.
"""
