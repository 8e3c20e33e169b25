"""Logger "vbrt": each message is said once, to a handler that asked for it or on stderr."""

import logging
import subprocess
import sys
import warnings

import pytest

from vbrt.host import logger
from vbrt.report.progress import wanted


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((record.levelname, record.getMessage()))


@pytest.fixture
def own():
    """A handler of the logger itself, at INFO."""
    kept = Kept()
    logger.LOGGER.addHandler(kept)
    logger.LOGGER.setLevel(logging.INFO)
    yield kept.said
    logger.LOGGER.removeHandler(kept)
    logger.LOGGER.setLevel(logging.NOTSET)
    logger._warned.clear()


def test_without_a_handler_notes_are_lines_and_fallbacks_warnings(capsys):
    logger.say("a note")
    with pytest.warns(UserWarning, match="a fallback") as caught:
        logger.warn("a fallback")
    assert capsys.readouterr().err == "vbrt: a note\n" and caught[0].filename == __file__


def test_a_handler_of_the_logger_gets_both_once_and_stderr_nothing(own, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            logger.warn("a fallback of 100 %")
        logger.say("a note of 100 %")
    assert own == [("WARNING", "a fallback of 100 %"), ("INFO", "a note of 100 %")]
    assert capsys.readouterr().err == ""


def test_an_inherited_handler_gets_notes_and_fallbacks_stay_warnings(capsys, caplog):
    with caplog.at_level(logging.INFO), pytest.warns(UserWarning, match="a fallback"):
        logger.warn("a fallback")
        logger.say("a note")
    assert caplog.messages == ["a note"] and capsys.readouterr().err == ""


@pytest.mark.parametrize(("verbosity", "note", "fallback"), [("INFO", 1, 1), ("warning", 0, 1), ("error", 0, 0)])
def test_a_verbosity_silences_what_is_below_it(verbosity, note, fallback, monkeypatch, capsys):
    monkeypatch.delenv("VBRT_PROGRESS", raising=False)
    monkeypatch.setattr(logger.LOGGER, "propagate", False)  # the test runner's handler is an inherited one
    logger.set_verbosity(verbosity)
    try:
        assert wanted() is bool(note) and wanted(True)
        logger.say("a note")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            logger.warn("a fallback")
    finally:
        logger.LOGGER.setLevel(logging.NOTSET)
    assert (len(capsys.readouterr().err.splitlines()), len(caught)) == (note, fallback)


def test_the_environment_sets_it_and_an_unknown_level_is_refused():
    program = "from vbrt.host import logger; print(logger.LOGGER.level)"
    for value, level, said in (("error", logging.ERROR, ""), ("loud", 0, "VBRT_VERBOSITY='loud' is ignored; expected")):
        done = subprocess.run(
            [sys.executable, "-c", program], env={"VBRT_VERBOSITY": value}, capture_output=True, text=True, check=True
        )
        assert int(done.stdout) == level and said in done.stderr
