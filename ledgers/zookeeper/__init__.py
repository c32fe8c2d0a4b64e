"""The metadata store on ZooKeeper, through the kazoo library.

In reading order: ``store`` implements ``ledgers.store``. ``flow`` orders, limits and joins its
requests. ``kazoo_session`` is the session that they are sent on. ``kazoo_internals`` has everything
that replaces, extends or reads kazoo's insides. ``servers`` finds out why no server answers.
"""
