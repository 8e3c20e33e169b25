"""Ctrl-C at a chosen place: wherever CPython can raise it, in everybody's code."""

import _thread
import dis
import functools
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType

# CPython 3.11 to 3.13 looks for signals in these: after the call, unless it has entered a Python function without C in
# between. It always calls through C for `*args` and `**options` (3.11), classes, partials, generators that `next` runs,
# and all functions under Dynamo: there a signal may come between a function's last instruction and the caller's next.
_CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")
_LOOKS = ("RESUME", *_CALLS, "JUMP_BACKWARD")


class _Trip:
    __neg__ = _thread.interrupt_main  # an operator and no call: the trace function itself does not look for signals


_TRIP = _Trip()


@functools.cache
def _at(code: CodeType, names: tuple[str, ...]) -> frozenset[int]:
    return frozenset(i.offset for i in dis.get_instructions(code) if i.opname in names)


class Interrupts:
    """Calls things and has a SIGINT come at a chosen place.

    Args:
        keep_frames: keep it with all its frames, as interactive sessions do until the next error.

    Attributes:
        places: of the last call, where one could have come, in order: code and offset; behind a call's offset, an odd
            one, where what was called has returned.
        raised: the KeyboardInterrupt of the last call, if frames are kept.
    """

    def __init__(self, *, keep_frames: bool = False) -> None:
        self.keep_frames = keep_frames
        self.places: list[tuple[CodeType, int]] = []
        self.raised: KeyboardInterrupt | None = None

    def __call__(self, at: int, work: Callable[[], object]) -> bool:
        """Run `work`, and have a SIGINT come just before the `at`-th time that CPython looks for one, from 1 on; also
        as a function returns, for CPython to find behind the call.

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
            place = self._place(frame, event)
            if place is None:
                return trace
            places.append(place)
            if len(places) == at:
                sys.settrace(None)
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

    def _place(self, frame: FrameType, event: str) -> tuple[CodeType, int] | None:
        """Return the place that an event of a trace is, if it is one. A caller whose call was entered without C in
        between is behind the call already, in CPython 3.11."""
        code, at, caller = frame.f_code, frame.f_lasti, frame.f_back
        if event == "opcode":
            return (code, at) if at in _at(code, _LOOKS) else None
        if event == "return" and caller is not None and caller.f_code.co_filename != __file__:
            return (caller.f_code, caller.f_lasti + 1) if caller.f_lasti in _at(caller.f_code, _CALLS) else None
        return (code, at) if event == "call" else None

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


interrupted = Interrupts()
