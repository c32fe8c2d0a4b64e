"""The judge: the Java BookKeeper client, asked from our tests and by ``make judge``.

A claim that a ledger is whole is worth something only when it does not come from us. So a small
Java program lists, reads and writes ledgers with BookKeeper's own classes. In reading order:

- ``Main.java`` and its commands: ``Judge``, ``Writer``, ``Reader``, ``Inspection``.
- ``build``: compiles them against a BookKeeper version, into the user's cache folder.
- ``records``: what the program prints, as values.
- ``tool``: the running program, as an object.
- ``judge``: the command behind ``make judge``.
"""
