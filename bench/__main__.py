"""``python -m bench``: the measurement against Java's AutoRecovery, in short."""

from bench.repair import main

main(["--quick"], prog_name="python -m bench")
