"""Kernels that are compiled ahead of their first launch."""

import gc
import threading
import weakref

import pytest
import torch

from tests.kernels.cuda.compiling_cases import asked  # noqa: F401  # a fixture
from vbrt.kernels.cuda import compiling, step_ops
from vbrt.kernels.cuda.compiling import begin, noting
from vbrt.kernels.step import NormRule


def norm(k=256, other=True, dtype=torch.bfloat16):
    x = torch.empty(1, k, dtype=dtype)
    return step_ops.norm_rows(x, x if other else None, NormRule(torch.empty(k, dtype=dtype), 1e-5))


def hows():
    return [launch.how for launch in compiling.FIRST]


@pytest.mark.parametrize("asked", ["triton", "direct"], indirect=True)
def test_a_launch_finds_what_was_compiled_ahead_and_compiles_what_was_not(asked):  # noqa: F811
    with noting() as found:
        norm()
        norm()
        norm(other=False)
    assert [each.name for each in found] == ["norm_kernel"] * 3 and not asked.compiled and not asked.launched
    begin(found)
    for each in found:
        each.finish()
    norm()
    norm(other=False)
    assert (hows(), asked.ahead, asked.by_launches) == (["ready"] * 2, ["norm_kernel"] * 2, [])
    assert sorted(asked.launchers) == sorted(each[:2] for each in asked.compiled)  # Triton 3.6 compiles these, too
    norm(k=250)
    norm()
    assert hows()[2:] == ["unforeseen"] and asked.by_launches == ["norm_kernel"] and len(asked.launched) == 4


def test_what_waits_to_be_compiled_holds_no_memory_of_a_launch(asked):  # noqa: F811
    with noting() as found:
        total, y = norm()
        held = weakref.ref(total), weakref.ref(y)
        del total, y
    gc.collect()
    assert not any(tensor() is not None for tensor in held)
    found[0].finish()
    norm()
    assert hows() == ["ready"] and not asked.by_launches


def test_a_kernel_that_was_launched_is_not_compiled_again(asked):  # noqa: F811
    norm()
    with noting() as found:
        norm()
    assert not found and len(asked.compiled) == len(asked.launched) == 1


def test_a_launch_compiles_what_no_thread_has_begun(asked):  # noqa: F811
    with noting() as found:
        norm()
    norm()
    begin(found)
    assert hows() == ["compiled"] and asked.compiled == [("norm_kernel", threading.get_ident(), True)]


def test_a_launch_waits_for_the_thread_that_compiles(asked, monkeypatch):  # noqa: F811
    begun, go = threading.Event(), threading.Event()
    compile = asked.compile

    def slow(*given):
        begun.set()
        assert go.wait(10)
        return compile(*given)

    monkeypatch.setattr(asked, "compile", slow)
    with noting() as found:
        norm()
    begin(found)
    assert begun.wait(10)
    finish = compiling.Compilation.finish
    monkeypatch.setattr(
        compiling.Compilation, "finish", lambda self: (go.set(), finish(self))
    )  # of the launch: it waits
    norm()
    assert hows() == ["waited"] and not asked.by_launches and len(asked.launched) == 1


def test_what_cannot_be_compiled_ahead_is_compiled_by_its_launch(asked):  # noqa: F811
    asked.failing = ("norm_kernel",)
    with noting() as found:
        norm()
    with pytest.warns(UserWarning, match=r"compiling ahead failed.*norm_kernel: RuntimeError: no room"):
        found[0].finish()
    norm()
    norm()
    assert found[0].error and hows() == ["failed"] and asked.by_launches == ["norm_kernel"]
    assert len(asked.launched) == 2


def test_only_the_thread_that_notes_launches_nothing(asked):  # noqa: F811
    with noting() as found:
        other = threading.Thread(target=norm)
        other.start()
        other.join()
    assert not found and asked.launched == ["norm_kernel"]


@pytest.mark.parametrize("collisions", [1, 3])
def test_threads_whose_parsing_collides_compile_again(collisions):
    """CPython 3.11: "AST constructor recursion depth mismatch", where two threads parse at the same time."""
    raised = [SystemError("AST constructor recursion depth mismatch (before=90, after=144)")] * collisions

    def compile():
        if raised:
            raise raised.pop()
        return "code"

    made = compiling.Compilation("kernel", compile)
    made.finish()
    assert (made.compiled, made.error) == ("code", "")
