"""Recordings of passes with hosted weights: what replays announce. The graph itself needs a GPU."""

import contextlib
from types import SimpleNamespace

import pytest

from vbrt.errors import TierError
from vbrt.model.pass_recording import PassRecording
from vbrt.tiers import Recording


class Hosting:
    """What a recording asks of `vbrt.model.hosting.Hosting`."""

    def __init__(self, posts: int) -> None:
        self.version, self.posts, self.log, self.capturing = 0, posts, [], False

    @contextlib.contextmanager
    def captured(self):
        self.capturing = True
        try:
            yield lambda: self.posts if self.capturing else -1
        finally:
            self.capturing = False

    def replayed(self, posts, replay):
        self.log.append(posts)
        return replay()


@pytest.fixture
def made(monkeypatch):
    """A recording of a pass to which two models may belong."""

    def init(self, stack, phase, keys):
        self._ended, self.replays = "", 0

    def replay(self, graph):
        self.replays += not self._ended
        return not self._ended

    monkeypatch.setattr(Recording, "__init__", init)
    monkeypatch.setattr(Recording, "__enter__", lambda self: self)
    monkeypatch.setattr(Recording, "__exit__", lambda self, *error: None)
    monkeypatch.setattr(Recording, "replay", replay)
    hostings = [Hosting(7), Hosting(0)]
    return PassRecording(None, "decode", None, hostings, []), hostings


def test_replays_announce_the_posts_of_the_models_that_have_some(made):
    recording, (some, none) = made
    with recording:
        assert some.capturing and none.capturing
    assert not (some.capturing or none.capturing)
    assert recording.replay(None) and recording.replay(None)
    assert (some.log, none.log, recording.replays) == ([7, 7], [], 2)


def test_another_choice_of_hosted_weights_ends_a_recording_with_posts(made):
    recording, (_some, none) = made
    with recording:
        pass
    none.version += 1
    assert not recording.replay(None) and "other weights" in recording._ended
    assert recording.replays == 0


def test_a_recording_without_posts_stays_whatever_is_hosted_later(made):
    recording, (some, _none) = made
    some.posts = 0
    with recording:
        pass
    some.version += 1
    assert recording.replay(None) and not some.log


def test_a_capture_that_fails_leaves_nothing_capturing(made):
    recording, hostings = made
    with pytest.raises(ValueError, match="inside"), recording:
        raise ValueError("inside")
    assert not any(hosting.capturing for hosting in hostings)


def test_caches_of_experts_hear_of_replays_and_may_refuse_them(made):
    recording, _ = made
    heard = []

    def fails():
        heard.append("again")
        raise TierError("a page did not come")

    recording._caches = [SimpleNamespace(begin_replay=lambda: heard.append("begun"))]
    with recording:
        pass
    assert recording.replay(None) and heard == ["begun"]
    recording._caches.append(SimpleNamespace(begin_replay=fails))
    with pytest.raises(TierError, match="did not come"):
        recording.replay(None)
    assert recording.replays == 1
