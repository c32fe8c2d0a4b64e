"""What commands and the HTTP API do in the cluster: one async function a question or an order.

An operation gets an ``AdminSession`` (or settings, if it opens a session that writes) and returns
an ``Answer``, which is defined beside it. It has the guards of its order. Commands and HTTP parse,
call it and print.

- ``plan`` shows what repairs would copy, ``observe`` what a leader would mark. ``repair`` repairs
  ledgers in this process. All three use the code of a node.
- ``queue`` and ``ledgers`` read, and ``topics`` says whose a ledger is; ``close`` and ``restore``
  write the metadata of one ledger.
- ``history`` reads what happened.
- ``feed`` shows, enables and disables the change feed, and shows its clients.
- ``archive`` orders and shows the archive of all metadata, ``archive_restore`` restores it,
  ``archive_rehearsal`` into a scratch ZooKeeper.
- ``bookies`` lists bookies; ``drains``, ``maintenance``, ``decommission`` and ``identities`` order
  what happens to one. ``holds``, ``checks``, ``limits``, ``switch`` and ``mutes`` concern the whole
  cluster.
- ``doctor`` checks what bookmender needs from its host, ZooKeeper and the bookies.
- ``orders`` says what prevents the effect of an order, ``waiting`` waits for ledgers to move.
- ``errors`` say that a request is wrong.
"""
