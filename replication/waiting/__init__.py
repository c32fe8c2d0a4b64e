"""What cannot be repaired now: when it is tried again, by whom, and what everybody is told of it.

``waiting_list`` puts aside; ``notes`` are what all nodes read, ``deferrals`` what this one keeps;
``world`` is what a ledger waits for, ``whereabouts`` says in words where bookies are.
"""
