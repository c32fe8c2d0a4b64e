"""In-memory implementations for tests and simulations, with faults on request.

``store`` implements the metadata store, ``bookies`` the bookies, and ``feed`` a
source of checkpoints and the receipts of clients.
"""
