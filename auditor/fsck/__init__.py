"""fsck: the proof, ledger by ledger and copy by copy, that the data is there. Runs on Spark.

``levels`` how closely it looks; ``verdicts`` what is said of a ledger. What an executor runs, in
reading order: ``inspecting``, the way in; ``copies``, a ledger looked at; ``look``, its copies;
``reads``, how they are asked for; ``comparing`` and ``sampling``; ``judging``, what was seen judged
by the ``scale``; ``summing_up``, the verdict as it grows; ``executor``, the session; ``pace``, its
share of the ``budget``. ``running``: a run as it is ordered; ``ledger_ids`` what there is to be
looked at, ``weighing`` how much of each, ``unchanged`` what need not be, all by a ``read_session``;
``spark`` where it runs; ``results`` what it leaves behind; ``publishing``, as marks for the daemon.
Nothing outside ``auditor.fsck`` and its command imports pyspark.
"""
