"""The program for spark-submit: ``spark-submit … deploy/spark_submit.py fsck run …``;
``docs/fsck.md`` has the rest."""

from daemon.cli.start import main

main()
