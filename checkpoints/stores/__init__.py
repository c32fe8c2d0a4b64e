"""Stores of receipts. All pass ``tests/checkpoints/test_stores.py``.

- ``sql``: SQLite in a file, or PostgreSQL. Needs the extra ``feed`` of the package.
- ``zookeeper``: one znode for each client.
"""
