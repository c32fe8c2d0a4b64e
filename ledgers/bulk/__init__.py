"""The bulk path: reads, verifies and copies entries without a task, future or object per entry.

In reading order: ``engine`` is the entry point. ``transfer`` is the state of one running transfer.
``source`` reads from a bookie entry by entry, ``batch_reads`` in runs, and ``target`` writes to
one. ``connection`` is what their connections share, ``frames`` has the V2 frames that they need.
``flow_control`` decides how much this process may request of each bookie, and ``limiters`` enforces
it.
"""
