"""The wire protocols of bookies, as functions of bytes: no socket, no clock, no task.

``framing`` cuts the stream into packets. ``messages`` are the requests, replies and status codes
that both protocols share; ``v2`` and ``v3`` encode and decode them. ``sasl`` has the mechanisms of
authentication, at bookies and at ZooKeeper.
"""
