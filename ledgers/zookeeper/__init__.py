"""The metadata store on ZooKeeper, through the kazoo library.

``store`` implements the metadata store for one session. ``session`` holds the state that every
store keeps of its session. ``requests`` converts operations, replies and errors to and from kazoo.

``outbox`` queues the requests. ``window`` limits the requests in flight, and ``pace`` the requests
per second.

``kazoo_session`` runs kazoo on its own thread, and ``inbox`` carries its calls to the event loop.
``kazoo_pipeline``, ``kazoo_watch`` and ``kazoo_multi_read`` add to kazoo pipelining, persistent
watches and joined reads.

Three modules work on any store. ``parents`` creates a znode with its parents. ``walk`` lists all
ledgers. ``id_generator`` generates ledger ids.
"""
