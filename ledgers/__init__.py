"""What a ledger is, and how to speak to bookies and to the metadata store about it.

A small asyncio client library for Apache BookKeeper that knows nothing of queues, leaders or audits.
"""
