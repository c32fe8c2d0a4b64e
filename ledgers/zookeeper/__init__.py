"""The metadata store on ZooKeeper, through the kazoo library.

In reading order: ``store`` implements ``ledgers.store``. ``flow`` orders, limits and joins its
requests. ``kazoo_session`` is the session that they are sent on, and ``session`` has what it shares
with the store in memory: the state of a session, and its watches. ``kazoo_internals`` has
everything that replaces, extends or reads kazoo's insides.
"""
