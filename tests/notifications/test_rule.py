"""Rule W holds over random histories, and each mistake against it is found."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

import notifications.client_state
import notifications.session
import tests.notifications.simulation
from notifications.client_state import ClientState, StoredState
from notifications.protocol import Beat, Change, Changes, ResumePoint
from notifications.session import Session
from notifications.versions import VersionTable
from tests.notifications.simulation import Simulation

SEED_COUNT = int(os.environ.get("NOTIFY_SEEDS", "1000"))
PLANTED_SEEDS_MAX = 6_000


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications.session, "CHANGES_A_FRAME", 2)
    monkeypatch.setattr(notifications.client_state, "KEYS_A_REGISTER", 3)


@pytest.mark.timeout(3600)
def test_every_client_learns_the_latest_version_whatever_fails() -> None:
    failed = {seed: told for seed in range(SEED_COUNT) if (told := Simulation(seed).run())}

    assert failed == {}


def answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications.session, "_reaches", lambda *_: True)
    monkeypatch.setattr(Session, "_is_due", lambda *_: True)


def moves_positions_with_each_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Session._answer

    def wrong(self: Session, now_s: float) -> None:
        answer(self, now_s)
        frames = self._frames
        self._frames = [
            Changes(positions=self._positions, n=self.n, changes=frame.changes)
            if isinstance(frame, Changes)
            else frame
            for frame in frames
        ]

    monkeypatch.setattr(Session, "_answer", wrong)


def stores_the_positions_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = ClientState.stored

    def wrong(self: ClientState) -> StoredState | None:
        found = stored(self)
        if found is None or self._feed is None:
            return None
        resume = str(ResumePoint(self._feed, self._positions))
        return StoredState(resume=resume, digest=found.digest, count=found.count)

    monkeypatch.setattr(ClientState, "stored", wrong)


def applies_positions_to_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = ClientState.connected

    def wrong(self: ClientState, now_s: float) -> Any:
        if (stored := self._stored) is not None:
            self._stored = StoredState(
                resume=stored.resume, digest=str(self._digest), count=self._digest.count
            )
        return connected(self, now_s)

    monkeypatch.setattr(ClientState, "connected", wrong)


def says_nothing_about_absent_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = VersionTable.answer

    def wrong(self: VersionTable, key: str, known: int) -> Any:
        found = answer(self, key, known)
        return None if found is None or found.version is None else found

    monkeypatch.setattr(VersionTable, "answer", wrong)


def forgets_deletions_below_the_horizon(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = VersionTable.apply

    def wrong(self: VersionTable, *args: Any, **kwargs: Any) -> None:
        horizon = self.horizon
        apply(self, *args, **kwargs)
        self.horizon = horizon

    monkeypatch.setattr(VersionTable, "apply", wrong)


def compares_no_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    welcome = Session._welcome

    def wrong(self: Session, now_s: float) -> None:
        if self._resume is not None:
            self._resume = ResumePoint(self._matcher.feed, self._resume.positions)
        welcome(self, now_s)

    monkeypatch.setattr(Session, "_welcome", wrong)
    monkeypatch.setattr(notifications.session, "_reaches", lambda *_: True)


def takes_an_old_answer_for_a_new_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    unregister = ClientState.unregister

    def wrong(self: ClientState, key: str) -> None:
        pending = {n: set(keys) for n, keys in self._pending.items()}
        unregister(self, key)
        self._pending = pending

    monkeypatch.setattr(ClientState, "unregister", wrong)


def gives_a_missed_deletion_an_earlier_zxid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tests.notifications.simulation,
        "missed_change",
        lambda change, _: (
            Change(change.key, change.version - 3, True) if change.is_deleted else change
        ),
    )


def compares_no_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Session,
        "receive",
        lambda self, frame, now_s: None if isinstance(frame, Beat) else receive(self, frame, now_s),
    )


receive = Session.receive


def takes_frames_for_as_new_as_their_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = ClientState.receive

    def wrong(self: ClientState, frame: Any, now_s: float) -> None:
        receive(self, frame, now_s)
        if isinstance(frame, Changes) and frame.n is not None:
            self._fresh_s = max(self._fresh_s, now_s - frame.age_ms / 1000)

    monkeypatch.setattr(ClientState, "receive", wrong)


def measures_the_clock_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications.client_state, "LATE_S", 1e9)


@pytest.mark.parametrize(
    "plant",
    [
        compares_no_digests,
        answers_at_once,
        moves_positions_with_each_frame,
        stores_the_positions_of_frames,
        applies_positions_to_other_keys,
        says_nothing_about_absent_objects,
        forgets_deletions_below_the_horizon,
        compares_no_generations,
        takes_an_old_answer_for_a_new_registration,
        gives_a_missed_deletion_an_earlier_zxid,
        takes_frames_for_as_new_as_their_arrival,
        measures_the_clock_once,
    ],
)
def test_a_planted_mistake_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    for seed in range(PLANTED_SEEDS_MAX):
        try:
            is_found = bool(Simulation(seed).run())
        except AssertionError:  # of the simulation
            is_found = True
        if is_found:
            print(f"found with seed {seed}")
            return
    pytest.fail("no history shows the mistake")
