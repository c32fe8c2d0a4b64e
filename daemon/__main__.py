"""``python -m daemon`` is the command ``bookmender``."""

from daemon.cli import main

main()
