"""The metadata store on ZooKeeper, through the kazoo library.

``store`` implements ``ledgers.store`` on a ``kazoo_session``. ``session`` is what it shares with the
store in memory: the state of a session, and its watches. ``flow`` orders, limits and joins requests.
``kazoo_internals`` holds all that replaces or extends kazoo's own classes.
"""
