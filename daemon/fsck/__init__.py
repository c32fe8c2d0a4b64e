"""``bookmender fsck``: ``command`` with its ``options`` and ``texts``, and ``failing`` for runs
that end early.

``running`` is what a run on Spark has around it: ``environment`` decides which variables Spark
starts with, ``interrupting`` keeps it quiet at Ctrl-C, ``forking`` makes its Python processes on
this machine.
"""
