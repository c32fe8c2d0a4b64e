"""The bytes that BookKeeper stores in ZooKeeper, as functions: no store, no socket.

``metadata`` of ledgers, ``layout`` of their znodes and the service URI, ``registration`` of
bookies. ``protobuf`` parses and formats protobuf messages as strictly as Java does.
"""
