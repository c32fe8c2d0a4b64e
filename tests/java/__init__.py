"""The judge: the Java BookKeeper client, asked by our tests and by ``make judge``.

A proof that a ledger is whole must not come from our own code. So a small Java program lists, reads
and writes ledgers with BookKeeper's own classes. In reading order:

- ``Main.java`` and its commands: ``Judge``, ``Writer``, ``Changer``, ``Reader``, ``Inspection``.
- ``build``: compiles them against a BookKeeper version, into the user's cache folder.
- ``messages``: the messages to and from the program, as values.
- ``jvm``: the program's process.
- ``tool``: the running program, as an object.
- ``judge``: the command behind ``make judge``.
- ``shell``: Java's ``bookkeeper shell``.
- ``fixtures``: the fixtures of tests that ask Java.
"""
