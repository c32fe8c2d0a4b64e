"""``python -m daemon`` is the command ``bookmender``."""

from daemon.cli.start import main

main()
