"""The bulk path: reads, verifies and copies entries without a task, future or object per entry.

In reading order: ``engine`` is the entry point. ``transfer`` is the state of one running transfer.
``source`` reads from a bookie, with ``single_reads`` or ``batch_reads``, and ``target`` writes to
one. ``connection`` is what their connections share, ``frames`` has the V2 frames that they need.
``flow_control`` decides how much this process may request of each bookie, and ``limiters`` enforces
it.
"""
