"""Kernels compile for the GPUs that may launch them, within their shared memory, registers and a bound on spills."""

import json
import types

import pytest

pytest.importorskip("triton.experimental.gluon")

from scripts import compile_sweep
from scripts.compile_sweep import (
    MOST_STACK_BYTES,
    TARGETS,
    Code,
    Compiled,
    amd_codes,
    amd_target,
    codes_for,
    compiled,
    faults,
)

_STRIDE = 24  # of launches in the exhaustive run: scripts/compile_sweep.py --all compiles each


def by_kernel(capability):
    found = {}
    for code in codes_for(capability):
        found.setdefault(code.name, []).append(code)
    return found


def check(codes, capability):
    for code in codes:
        assert not faults(compiled(code, capability), capability), (code.name, code.signature, code.constants)


@pytest.mark.sample(4)
@pytest.mark.parametrize("capability", TARGETS)
def test_kernels_compile_for_each_target_within_its_limits(capability):
    """A seventh of a target's kernels, other ones for each target."""
    turn, targets = list(TARGETS).index(capability), len(TARGETS)
    kernels = by_kernel(capability)
    mine = [codes for at, codes in enumerate(kernels[name] for name in sorted(kernels)) if at % targets == turn]
    assert len(mine) >= 2
    check([codes[(turn + 1) * len(codes) // (targets + 1)] for codes in mine], capability)


def test_attention_of_the_widest_heads_takes_what_sm_75_has():
    codes = by_kernel(75)["step_triton.attend_kernel"]
    widest = [code for code in codes if code.signature["q_ptr"] == "*fp16" and "'COLUMNS': 512" in code.arguments]
    assert len(widest) == 2  # with and without a mask
    check(widest[:1], 75)


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", range(3))
@pytest.mark.parametrize("capability", TARGETS)
def test_launches_compile_for_each_target_within_its_limits(capability, start):
    check(codes_for(capability)[8 * start :: _STRIDE], capability)


@pytest.mark.parametrize(
    "architecture",
    [
        "gfx1100",
        pytest.param("gfx942", marks=pytest.mark.exhaustive),
        pytest.param("gfx90a", marks=pytest.mark.exhaustive),
        pytest.param("gfx1201", marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_in_plain_triton_compile_for_amd(architecture, request):
    import triton

    kernels = {code.name: code for code in amd_codes(architecture)}
    assert len(kernels) >= 11
    if request.node.get_closest_marker("exhaustive") is None:
        kernels = {name: code for name, code in kernels.items() if name.startswith(("fine.", "whole."))}
    for code in kernels.values():
        source = code.kernel.ASTSource(code.kernel, code.signature, code.constants, code.attributes)
        made = triton.compile(source, target=amd_target(architecture), options=code.options)
        assert made.asm["hsaco"] and made.metadata.shared <= 64 << 10, code.name  # of a workgroup


WITHIN = Compiled(shared_bytes=99 << 10, registers=128, stack_bytes=MOST_STACK_BYTES, threads=512)


def test_what_exceeds_a_limit_is_named():
    assert faults(WITHIN, 86) == []
    (fault,) = faults(WITHIN._replace(shared_bytes=100 << 10), 86)
    assert fault.said == "102400 bytes of shared memory; expected at most 101376" and 1 < fault.times < 1.02
    over = WITHIN._replace(registers=129, stack_bytes=MOST_STACK_BYTES + 8)
    assert [fault.said.split()[1] for fault in faults(over, 80)] == ["registers", "bytes"]
    assert [fault.said for fault in faults(RuntimeError("no such instruction"), 75)] == [
        "RuntimeError: no such instruction"
    ]


def test_all_faults_of_all_targets_are_told_by_kernel_and_leave_no_row(monkeypatch, tmp_path, capsys):
    def code(name, block):
        kernel = types.SimpleNamespace(fn=types.SimpleNamespace(__module__="vbrt.kernels.cuda.step", __name__=name))
        return Code(kernel, {"x_ptr": "*bf16", "K": "i32", "BLOCK": "constexpr"}, {(2,): block}, {}, {"num_warps": 4})

    codes, result = [code(name, block) for name in ("route", "norm") for block in (64, 128, 256)], tmp_path / "out.json"
    stacks = {86: [104, 960, 200, 0, 96, 2000], 80: [0, 96] * 3}
    compile_all = lambda codes, capability, jobs: [WITHIN._replace(stack_bytes=n) for n in stacks[capability]]  # noqa: E731
    result.write_text('{"rows": [{"target": "sm_86"}, {"target": "sm_90"}]}')
    monkeypatch.setattr(compile_sweep, "RESULT", result)
    monkeypatch.setattr(compile_sweep, "codes_for", lambda capability: codes)
    monkeypatch.setattr(compile_sweep, "_compile_all", compile_all)
    monkeypatch.setattr("sys.argv", ["compile_sweep.py", "--all", "86", "80"])
    with pytest.raises(SystemExit) as ended:
        compile_sweep.main()
    assert ended.value.code
    first, arguments, second, *_ = capsys.readouterr().out.splitlines()
    bound = "bytes of stack of a thread; expected at most 96"
    assert first == f"sm_86: step.route: 3 launches, at worst 960 {bound}"
    assert arguments.strip() == "{'BLOCK': 128} {'x_ptr': '*bf16'} warps: 4"
    assert second == f"sm_86: step.norm: 1 launches, at worst 2000 {bound}"
    rows = {row["target"]: row for row in json.loads(result.read_text())["rows"]}
    assert list(rows) == ["sm_80", "sm_90"] and rows["sm_80"]["max_stack_bytes"] == 96


def test_a_target_compiles_nothing_that_its_launches_leave_out():
    names = {capability: {code.name for code in codes_for(capability)} for capability in (75, 80, 90)}
    assert (
        not any(name.startswith("e2m1.narrow") for name in names[75]) and "fine.merge_triton.merge_kernel" in names[75]
    )
    assert any(name.startswith("e2m1.mma") for name in names[80]) and not any("fp8" in name for name in names[80])
    assert any(name.startswith("e2m1.persistent") for name in names[90])
