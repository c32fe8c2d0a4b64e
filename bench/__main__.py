"""``python -m bench``: the measurement against Java's AutoRecovery."""

from bench.repair_bench import main

main(prog_name="python -m bench")
