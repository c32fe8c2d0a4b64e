"""Operations on ledgers: ``creation``, ``writer``, ``opening``, ``reader``.

``recovery`` closes an open ledger. ``fencing`` finds its end, by the rules in
``recovery_verdicts``. If the end cannot be proven, ``rescue`` restores the copies of the remaining
entries. ``latecomers`` are bookies that joined the ledger later and must first prove that they lost
nothing.

Shared: ``appending`` (adds to a write set, with ``acks`` and ``ensembles``), ``asking`` (one
question to several bookies), ``ahead`` (reads ahead), ``tasks``. ``last_entries`` estimates how far
an open ledger reaches.
"""
