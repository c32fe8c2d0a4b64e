"""The bytes that BookKeeper and Pulsar store in ZooKeeper: ``metadata`` of ledgers, ``layout`` of their
znodes and the service URI, ``registration`` of bookies, ``pulsar`` racks and isolation.
``protobuf`` parses and formats protobuf messages as strictly as Java does.
"""
