"""How fast fsck looks at ledgers, at each level, beside Java's check of all ledgers: ``python -m
bench.fsck``.

``loads`` what is looked at; ``reading`` on bookies, by us; ``java`` by Java's auditor; ``znodes``
the metadata of very many ledgers; ``on_spark`` whole runs of either; ``processes`` who used the
CPU; ``records``, ``report``.
"""
