"""The health of the cluster, as ``bookmender status`` and the HTTP API show it.

``gathering`` reads the facts from ZooKeeper into the values of ``state``, with the ``leader``'s
records, the ``pace`` of copying and ``unreadable`` records. ``conditions`` is the table of what can
be wrong and what to do, made of entries of ``condition``. ``report`` writes all of it as text and
as the ``answers`` of programs, with parts of ``records``.
"""
