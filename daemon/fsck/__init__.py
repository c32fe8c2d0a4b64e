"""``bookmender fsck``: the ``command``, the ``texts`` it prints, and its ``running`` on Spark.

``forking`` starts Spark's Python processes on this machine.
"""
