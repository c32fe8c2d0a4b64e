"""``bookmender status`` and ``bookmender health explain``.

``command`` prints a status. ``gathering`` reads it from ZooKeeper into the values of ``state``,
with the ``leader``'s records and the ``pace`` of copying. ``conditions`` lists what is wrong and
what to do; ``report`` writes all of it as text and as JSON, with parts of ``records``.
``explanations`` describes each condition, and ``health_command`` prints that.
"""
