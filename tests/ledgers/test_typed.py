"""Any thread may decode, also types that no thread has met before."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
THREADS = """
import dataclasses, sys, threading
from ledgers.typed import decode_json

sys.setswitchinterval(1e-6)

def new_type(number):
    fields = [(f"field{i}", int) for i in range(8)]
    inner = dataclasses.make_dataclass(f"Inner{number}", fields)
    return dataclasses.make_dataclass(f"Outer{number}", [("number", int), ("parts", list[inner])])

def decode(kind, barrier):
    barrier.wait()
    decode_json(b'{"number": 1, "parts": []}', kind)

for number in range(300):
    kind, barrier = new_type(number), threading.Barrier(6)
    threads = [threading.Thread(target=decode, args=(kind, barrier)) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
"""


def test_threads_that_meet_a_new_type_at_once_do_not_crash() -> None:
    subprocess.run([sys.executable, "-c", THREADS], cwd=ROOT, check=True, timeout=120)


def test_nothing_else_decodes_a_type_that_may_be_new() -> None:
    packages = ("ledgers", "replication", "auditor", "checkpoints", "archive", "daemon")
    found = [
        path.relative_to(ROOT).as_posix()
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"decode\([^)]*type=|msgspec\.convert\(", path.read_text())
    ]

    assert found == ["ledgers/typed.py"]
