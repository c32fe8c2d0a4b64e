"""What cannot be repaired now: when it is tried again, by whom, and what everybody is told of it.

``waiting_list`` puts aside; ``notes`` are what all nodes read, ``deferrals`` what this one keeps;
``unproven_ends`` are for people, of ledgers that may be marked no more;
``world`` is what a ledger waits for, ``whereabouts`` says in words where bookies are.
"""
