"""``bookmender fsck``: ``command`` with its ``options`` and ``texts``; ``running`` is what a run on Spark has around it,
``environment`` which variables Spark starts with, ``forking`` where its Python processes come from on this machine."""
