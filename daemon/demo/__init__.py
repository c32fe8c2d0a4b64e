"""The demonstration: kills one of several real bookies and proves that no entry was lost.

``command`` prints what ``scenario`` does: a ``workload`` writes ledgers, ``nodes`` are the daemons
that repair them, and ``proof`` reads every copy.
"""
