"""Logger "vbrt": fallbacks, notes and progress, each said once, to the program's handlers or else on stderr.

    logging.getLogger("vbrt").addHandler(handler)   # fallbacks as WARNING records, notes and progress as INFO
    logging.basicConfig(level="INFO")               # notes and progress there; fallbacks stay Python warnings
    VBRT_VERBOSITY=error python serve.py            # info (default), warning: no notes, error: no fallbacks either

`stats().fallbacks` has all fallbacks, said or not.
"""

import logging
import os
import sys
import warnings

__all__ = ["LOGGER", "is_heard", "is_silent", "say", "warn"]

LOGGER = logging.getLogger("vbrt")
LOGGER.addHandler(logging.NullHandler())

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_VARIABLE = "VBRT_VERBOSITY"
_warned: set[str] = set()


def set_verbosity(asked: str) -> None:
    """Set the logger's level by name; "" leaves it. Other names are refused by a warning."""
    name = asked.strip().lower()
    if name in _LEVELS:
        LOGGER.setLevel(_LEVELS[name])
    elif name:
        warnings.warn(f"{_VARIABLE}={asked!r} is ignored; expected {', '.join(_LEVELS)}", stacklevel=2)


def is_silent(level: int) -> bool:
    """True if messages of a level are shown nowhere."""
    return LOGGER.level > level


def is_heard(level: int) -> bool:
    """True if a handler of the program, the logger's own or an inherited one, takes messages of a level."""
    handlers = [*LOGGER.handlers, *(logging.root.handlers if LOGGER.propagate else ())]
    return LOGGER.isEnabledFor(level) and any(map(_takes, handlers))


def say(text: str) -> None:
    """Say a note or progress: an INFO record, or without a handler for it a line on stderr."""
    if is_silent(logging.INFO):
        return
    if is_heard(logging.INFO):
        LOGGER.info("%s", text)
    else:
        print(f"vbrt: {text}", file=sys.stderr, flush=True)


def warn(text: str, stacklevel: int = 1) -> None:
    """Warn: a Python warning, or a WARNING record, once per text, if the logger has a handler of its own.

    An inherited handler does not suffice: `logging.captureWarnings` is how a program asks for Python's warnings there.
    """
    if is_silent(logging.WARNING):
        return
    if not any(map(_takes, LOGGER.handlers)):
        warnings.warn(text, stacklevel=stacklevel + 1)
    elif text not in _warned:
        _warned.add(text)
        LOGGER.warning("%s", text)


def _takes(handler: logging.Handler) -> bool:
    return not isinstance(handler, logging.NullHandler)


set_verbosity(os.environ.get(_VARIABLE, ""))
