"""The metadata store on ZooKeeper: ``store`` one session of it, by way of kazoo.

``kazoo_session``, ``kazoo_pipeline``, ``kazoo_watch`` and ``kazoo_multi_read`` are what kazoo
lacks; ``outbox``, with ``window`` and ``pace``, sends no more than ZooKeeper bears; ``requests``
and ``inbox`` serve the store; ``session`` is what every store shares. ``parents``, ``walk`` and
``id_generator`` work on any store.
"""
