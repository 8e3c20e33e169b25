"""Ctrl-C at a chosen place: wherever CPython can raise it, or at any bytecode at all, in everybody's code."""

import _thread
import dis
import functools
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType

_LOOKS = ("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD")  # CPython looks for signals in these


class _Trip:
    __neg__ = _thread.interrupt_main  # an operator and no call: the trace function itself does not look for signals


_TRIP = _Trip()


@functools.cache
def _looks(code: CodeType) -> frozenset[int]:
    return frozenset(i.offset for i in dis.get_instructions(code) if i.opname in _LOOKS)


class Interrupts:
    """Calls things and has a SIGINT come at a chosen place.

    Args:
        anywhere: before any bytecode, also where CPython does not look for signals; the KeyboardInterrupt is made up
            then, and comes where no signal could.
        keep_frames: keep it with all its frames, as interactive sessions do until the next error.

    Attributes:
        places: of the last call, where one could have come, in order: code and offset.
        raised: the KeyboardInterrupt of the last call, if frames are kept.
    """

    def __init__(self, *, anywhere: bool = False, keep_frames: bool = False) -> None:
        self.anywhere, self.keep_frames = anywhere, keep_frames
        self.places: list[tuple[CodeType, int]] = []
        self.raised: KeyboardInterrupt | None = None

    def __call__(self, at: int, work: Callable[[], object]) -> bool:
        """Run `work`, and have a SIGINT come just before the `at`-th time that CPython looks for one, from 1 on.

        Whether it came: False when `work` ended before. The signal is a real one, so it is raised where CPython raises
        it: when a function begins, when a call into C has returned, when a loop jumps back, in the standard library and
        in torch as well. Only what happens in this file is left out. In a `__del__` it is printed and not raised.
        """
        self.places, self.raised = [], None
        places = self.places

        def trace(frame: FrameType, event: str, _: object):
            if event == "call":
                if frame.f_code.co_filename == __file__:
                    return None
                frame.f_trace_opcodes, frame.f_trace_lines = True, False
                if self.anywhere:
                    return trace
            elif event != "opcode" or not (self.anywhere or frame.f_lasti in _looks(frame.f_code)):
                return trace
            places.append((frame.f_code, frame.f_lasti))
            if len(places) == at:
                sys.settrace(None)
                if self.anywhere:
                    raise KeyboardInterrupt
                -_TRIP  # noqa: B018 - trips the signal
                return None
            return trace

        before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.settrace(trace)
        try:
            work()
            sys.settrace(None)
            for _ in range(2):  # a signal that is left over comes here
                pass
        except KeyboardInterrupt as error:
            self.raised = error if self.keep_frames else None
        finally:
            sys.settrace(before)
            signal.signal(signal.SIGINT, handler)
        return len(places) == at

    def count(self, work: Callable[[], object]) -> list[int]:
        """Run `work` uninterrupted; `at` for each distinct place that it comes through, the first time and the last."""
        self(0, work)
        first: dict[tuple[CodeType, int], int] = {}
        for at, place in enumerate(self.places, 1):
            first.setdefault(place, at)
        last = {place: at for at, place in enumerate(self.places, 1)}
        return sorted({*first.values(), *last.values()})

    def __str__(self) -> str:
        code, offset = self.places[-1]
        line = next((line for start, end, line in code.co_lines() if start <= offset < end), None)
        return f"{code.co_filename}:{line} in {code.co_qualname}"


interrupted, interrupted_anywhere = Interrupts(), Interrupts(anywhere=True)
