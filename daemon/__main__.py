"""``python -m daemon`` is the command ``bookmender``."""

from daemon.start import main

main()
