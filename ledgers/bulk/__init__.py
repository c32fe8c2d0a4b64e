"""The bulk path: entries are read, verified and copied without a task, future or object per entry.

``engine`` is the way in. ``transfer`` is the state of one running transfer, ``source`` reads from a
bookie, and ``target`` writes to one, each over a ``connection``. ``frames`` are the few V2 frames
that it needs. ``flow_control`` sets how much this process may ask of each bookie, through the
``limiters``.
"""
