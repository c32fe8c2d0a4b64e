"""The quarantine of unresponsive bookies: how long it lasts, and what ends it."""

import pytest
from structlog.testing import capture_logs

from ledgers.health import WAIT_MAX_S, WAIT_MIN_S, BookieHealth, Shut
from ledgers.model import BookieId
from tests.ledgers.client_cases import ManualClock

B1, B2 = BookieId("b1:3181"), BookieId("b2:3181")


class Scene:
    """A quarantine, the time, and the bookies' registrations."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.lives = {B1: 1, B2: 1}
        self.quarantine = BookieHealth(self.clock, lambda bookie: self.lives.get(bookie, 0))

    def stop_answering(self, bookie: BookieId = B1) -> bool:
        assert self.quarantine.admits(bookie)
        self.quarantine.note_silence(bookie)
        return self.quarantine.holds(bookie)

    def pass_wait(self, times: int = 1) -> float:
        """Let the wait end and a probe fail, as often as given. Return the last wait."""
        for _ in range(times):
            wait_s = 0.0
            while not self.quarantine.admits(B1):
                self.clock.advance(1.0)
                wait_s += 1.0
            self.quarantine.note_silence(B1)
        return wait_s


def test_an_unresponsive_bookie_is_not_asked_until_the_wait_ends() -> None:
    scene = Scene()

    assert scene.stop_answering()
    scene.clock.advance(WAIT_MIN_S - 1)
    assert not scene.quarantine.admits(B1)
    assert scene.quarantine.shut() == {B1: Shut(scene.clock.wall_ms() + 1000)}
    assert scene.quarantine.admits(B2)
    scene.clock.advance(1)

    assert scene.quarantine.shut() == {}
    assert scene.quarantine.admits(B1)


def test_one_probe_at_a_time() -> None:
    scene = Scene()
    scene.stop_answering()
    scene.clock.advance(WAIT_MIN_S)

    assert scene.quarantine.admits(B1)
    assert not scene.quarantine.admits(B1)
    assert scene.quarantine.shut() == {B1: Shut(scene.clock.wall_ms())}

    scene.quarantine.note_nothing(B1)
    assert scene.quarantine.admits(B1), "the probe was called off"


def test_the_wait_doubles_with_each_failed_probe_up_to_a_bound() -> None:
    scene = Scene()
    scene.stop_answering()

    assert scene.pass_wait() == WAIT_MIN_S
    assert scene.pass_wait() == 2 * WAIT_MIN_S
    assert scene.pass_wait(20) == WAIT_MAX_S


def test_requests_sent_before_it_began_are_no_probes() -> None:
    scene = Scene()
    assert scene.quarantine.admits(B1)

    assert scene.stop_answering()
    scene.clock.advance(1)
    scene.quarantine.note_silence(B1)

    assert scene.pass_wait() == WAIT_MIN_S - 1


def test_an_answer_ends_it_and_resets_the_wait() -> None:
    scene = Scene()
    scene.stop_answering()
    scene.pass_wait(3)

    with capture_logs() as logs:
        scene.quarantine.note_answer(B1)
        scene.quarantine.note_answer(B1)

    assert [(each["event"], each["silent_s"]) for each in logs] == [("bookie.answered_again", 70)]
    assert scene.quarantine.admits(B1)
    assert not scene.quarantine.holds(B1)

    scene.stop_answering()
    assert scene.pass_wait() == WAIT_MIN_S


@pytest.mark.parametrize(
    "life",
    [pytest.param(2, id="it registered again"), pytest.param(0, id="it is no longer registered")],
)
def test_a_new_registration_ends_it_at_once(life: int) -> None:
    """Nothing is remembered."""
    scene = Scene()
    scene.stop_answering()

    scene.lives[B1] = life

    assert scene.quarantine.shut() == {}
    assert scene.quarantine.admits(B1)
    scene.lives[B1] = 1
    assert scene.quarantine.admits(B1)


def test_a_bookie_that_is_not_registered_is_in_no_quarantine() -> None:
    """Before a ledger is fenced an absent bookie is asked directly (rule S13)."""
    scene = Scene()
    del scene.lives[B1]

    assert not scene.stop_answering()

    assert scene.quarantine.admits(B1)


def test_the_last_reported_reason_is_kept() -> None:
    scene = Scene()

    scene.stop_answering()
    scene.quarantine.note_silence(B1, "it requires authentication")
    scene.quarantine.note_silence(B1)

    assert scene.quarantine.shut()[B1].reason == "it requires authentication"
