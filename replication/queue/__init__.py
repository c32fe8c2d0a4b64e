"""The under-replication queue: what is marked, who has it, and what a worker takes next.

``queue`` takes a marked ledger (``take``) and gives it back; ``mark_tree`` reads one tree of marks,
Java's or our own; ``payloads`` and ``tree`` are the znodes shared with Java. How a worker chooses:
``lookout`` looks, ``shares`` says whose a ledger is, ``choice`` in which order, ``urgent`` is the
leader's hint. ``batching`` joins transactions; ``idle_waits`` says how often an idle one looks,
``disable_switch`` whether it may; ``given_ledgers`` is the queue of a repair by hand,
``lock_by_hand`` a lock without a mark, ``own_mark`` a mark beside another write, ``locks`` the
operations on any lock of ours, ``listing`` all of the queue for those who look.
"""
