"""Notifications: programs that hold a ledger learn each change of it, also after failures.

Clients register for objects: ledgers, bookies and objects that applications publish. A server tells
each client the latest version of its objects. A server keeps no state that must survive it: it
follows the change feed and watches ZooKeeper as any reader does, and clients register again.

Rule W, on which all this stands: *a frame* ``changes(positions=P, n=N)`` *means: of each object
that was registered by messages up to N, the client has now been told the latest version that is
not above the position of the object's kind, or that this version is unknown.* So a lost connection
needs nothing but the positions; duplicates are harmless; any server serves any client. Eight
conditions keep the rule true. Tests break each of them, and find a history that loses a change
(``test_rule``, ``test_conditions``, ``test_bookies``, ``test_objects``):

1. A server behind a client answers only after it has caught up (``session``).
2. Of an answer in several frames, only the last carries the new positions and N (``session``).
3. The stored positions are below the version of each item that the application has not finished
   (``client_state``).
4. Stored positions count only for the registrations that they were stored with
   (``client_state``).
5. Silence about an object that the server does not know is allowed only if the client knows the
   object at the server's horizon or later (``versions``).
6. On a new connection, no answer moves the positions before the server knows all registrations
   (``client_state``).
7. A change whose zxid is not known is told without a version (``versions``).
8. What may have come and gone between two readings raises the horizon (``bookies``, ``objects``).

- ``protocol``: frames, keys, resume points and the digest of registrations.
- ``versions``: the latest version of each object of one kind.
- ``sources``: where a server learns of changes: ``feed_source`` of ledgers, ``bookies`` of bookies,
  and ``objects`` of what applications publish.
- ``session``: one client, as its server sees it. No I/O.
- ``matcher``: which clients are to be told of a change. No I/O.
- ``following``: keeps a matcher up to date from the sources.
- ``server``: connections, ticks and limits. ``discovery``: which servers live. ``metrics``.
- ``client_state``: one client, as its own library sees it. No I/O.
- ``client``: the library.
"""
