"""Process setup of `vbrt`, before the command line is imported: signals, GC, allocator."""

import _thread
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

#: commands that import and print something, without state to clean up
_BRIEF = ("estimate", "inspect", "plan")
#: torch's allocator settings: the variable's older and newer name
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SHOW_CURSOR = b"\x1b[?25h"
_AGAIN_SECONDS = 0.002


def program() -> NoReturn:
    """Run `vbrt` as a process, with the exit code of `main`.

    Garbage collection took two fifths of transformers' import time: during the imports, where it found nothing, and of
    the modules at exit. Brief commands skip both, and Ctrl-C ends them at once.
    """
    brief = sys.argv[1:2] and sys.argv[1] in _BRIEF
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else the parent process ignores it
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
    except KeyboardInterrupt:  # while reporting how the command ended
        code = 130
    if interruptible:
        signal.signal(signal.SIGINT, _leave)
    if brief:
        _end(code)
    sys.exit(code)


def _grow_segments(environment: MutableMapping[str, str]) -> None:
    """Enable expandable segments in torch's allocator, unless its settings are given, or several processes share GPUs:
    pages allocated among temporaries fragment it, and left up to a fifth of a GPU unused. torch has none on Windows."""
    if sys.platform == "win32":
        return
    if "LOCAL_RANK" not in environment and not any(name in environment for name in _ALLOCATOR):
        environment[_ALLOCATOR[0]] = "expandable_segments:True"


def _leave(_signal: int, _frame: FrameType | None) -> None:
    """End the process, which has nothing to clean up."""
    os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + b"vbrt: interrupted\n")
    os._exit(130)


def _interrupt(_signal: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt once nothing is being imported.

    The import system drops exceptions in some callbacks, transformers converts others, and torch aborts.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            again = threading.Timer(_AGAIN_SECONDS, _send_interrupt)
            again.daemon = True
            return again.start()
        frame = frame.f_back
    raise KeyboardInterrupt


def _send_interrupt() -> None:
    if hasattr(signal, "pthread_kill"):  # a signal also interrupts the main thread's waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    else:  # Windows
        _thread.interrupt_main()


def _end(code: int) -> NoReturn:
    """End the process without interpreter teardown; run atexit functions and flush streams."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
