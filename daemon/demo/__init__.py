"""The demonstration: real bookies, one of them killed, and the proof that nothing was lost.

``command`` prints what ``scenario`` does: a ``workload`` writes ledgers, ``nodes`` are the daemons
that repair them, and ``proof`` reads every copy.
"""
