"""The under-replication queue, and the worker that takes ledgers from it and repairs them."""
