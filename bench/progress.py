"""Reports the progress of the bench on standard error: one line per run, with an estimate of the
remaining time."""

import time
from collections.abc import Iterable, Sequence

import click

from bench.runs import Key

RUN_GUESS_S = 25.0
"""The estimate until a run of this kind was measured."""


class Progress:
    """Remembers how long each contender took for each load in the last measurement."""

    def __init__(self) -> None:
        self._began_s = self._ended_s = time.monotonic()
        self._left: list[Key] = []
        self._took_s: dict[tuple[str, str], float] = {}

    def expect(self, keys: Iterable[Key]) -> None:
        self._left = list(keys)

    def say(self, text: str) -> None:
        elapsed_s = time.monotonic() - self._began_s
        click.echo(f"[{elapsed_s:6.0f} s, {self._left_s() / 60:4.1f} min left] {text}", err=True)

    def done(self, key: Key, text: str) -> None:
        now_s = time.monotonic()
        self._took_s[key.contender, key.load] = now_s - self._ended_s
        self._ended_s = now_s
        self._left.remove(key)
        self.say(f"{key.contender}, {key.of_pass.value}, {key.load}, {key.repeat}: {text}")

    def drop(self, keys: Sequence[Key], text: str) -> None:
        self._ended_s = time.monotonic()
        self._left = [key for key in self._left if key not in keys]
        self.say(text)

    def _left_s(self) -> float:
        known = self._took_s
        guess_s = sum(known.values()) / len(known) if known else RUN_GUESS_S
        return sum(known.get((key.contender, key.load), guess_s) for key in self._left)
