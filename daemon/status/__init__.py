"""``bookmender status`` and ``bookmender health explain``.

``command`` prints both. ``gathering`` reads the facts from ZooKeeper into the values of ``state``,
with the ``leader``'s records, the ``pace`` of copying and ``unreadable`` records. ``conditions``
lists what is wrong and what to do; ``report`` writes all of it as text and as JSON, with parts of
``records``. ``explanations`` describes each condition.
"""
