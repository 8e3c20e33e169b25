"""The process `vbrt`: what holds from its first line on, before the command line is imported."""

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import MutableMapping
from types import FrameType
from typing import NoReturn

__all__ = ["program"]

#: commands that import and say something, and leave nothing behind
_BRIEF = ("estimate", "inspect", "plan")
#: how torch's allocator is told what to do, by its older and its newer name
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SHOW_CURSOR = b"\x1b[?25h"
_AGAIN_SECONDS = 0.002


def program() -> NoReturn:
    """Be the process `vbrt`, whose exit code is what `main` returns.

    Of imports of transformers two fifths of the time were the collection of garbage: while the modules came, which
    found nothing, and of the modules themselves at exit. Brief commands do without either, and Ctrl-C ends them at
    once.
    """
    brief = sys.argv[1:2] and sys.argv[1] in _BRIEF
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else who has started it ignores it
    if interruptible:
        signal.signal(signal.SIGINT, _leave)
    if brief:
        gc.disable()
    _grow_segments(os.environ)
    from vbrt.cli.main import main

    if interruptible and not brief:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        code = main()
    except KeyboardInterrupt:  # while it said how the command ended
        code = 130
    if interruptible:
        signal.signal(signal.SIGINT, _leave)
    if brief:
        _end(code)
    sys.exit(code)


def _grow_segments(environment: MutableMapping[str, str]) -> None:
    """Have the segments of torch's allocator grow, unless somebody has said what it does, or several processes share
    GPUs: pages that come while temporaries go split the blocks of these, and up to a fifth of a GPU stayed unused."""
    if "LOCAL_RANK" not in environment and not any(name in environment for name in _ALLOCATOR):
        environment[_ALLOCATOR[0]] = "expandable_segments:True"


def _leave(_signal: int, _frame: FrameType | None) -> None:
    """End the process, which has nothing to clean up."""
    os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + b"vbrt: interrupted\n")
    os._exit(130)


def _interrupt(_signal: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt once nothing is being imported.

    The import system drops exceptions in some of its callbacks, transformers makes others of them, and torch aborts.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            main = threading.main_thread().ident  # to which a signal also ends a wait
            again = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (main, signal.SIGINT))
            again.daemon = True
            return again.start()
        frame = frame.f_back
    raise KeyboardInterrupt


def _end(code: int) -> NoReturn:
    """End the process without taking the interpreter apart; what is registered for its end runs, and streams are
    written."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
