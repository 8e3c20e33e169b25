"""Norms, rotations, gates and attention of a recorded step in C, beside what `kernels/step.py` says they are."""

import ctypes

import pytest
import torch

from tests.matrix import matrix
from vbrt.kernels import step
from vbrt.kernels.cpu.build import refusal
from vbrt.kernels.cpu.prepared import c_call
from vbrt.kernels.cpu.step import GATES, prepare, program
from vbrt.kernels.operator_trace import Form

pytestmark = pytest.mark.skipif(bool(refusal(torch.device("cpu"), "step")), reason="no C compiler")

ERROR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = list(ERROR)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def computed(function, *args):
    """What C gives, and what torch does."""
    want = function(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])
    forms = Form.of(want) if isinstance(want, torch.Tensor) else tuple(map(Form.of, want))
    made = prepare(function, args, forms, lambda form: torch.empty(0, dtype=form.dtype).new_empty(form.shape))
    assert made is not None
    made.run()
    return made.results, (want,) if isinstance(want, torch.Tensor) else want


def close(function, *args) -> None:
    for got, want in zip(*computed(function, *args), strict=True):
        assert got.dtype is want.dtype
        torch.testing.assert_close(got, want, atol=ERROR.get(got.dtype, 0), rtol=ERROR.get(got.dtype, 0))


@matrix(dtype=DTYPES, rule=[(0.0, True), (1.0, False), (1.0, True), None], columns=[8, 300, 1040])
def test_norms_with_and_without_a_sum(dtype, rule, columns):
    gain = None if rule is None else 0.1 * drawn(columns, dtype=dtype)
    made = step.NormRule(gain, 1e-5, *(rule or (0.0, True)))
    x, other = drawn(2, 3, columns, dtype=dtype), drawn(3, 2, columns, dtype=dtype).view(2, 3, columns)
    close(step.normed, x, made)
    close(step.summed, x, other, made)


@matrix(dtype=DTYPES, turned=[16, 12], normed=[False, True], batch=[1, 2])
def test_rotations_have_the_bits_of_torch_and_go_into_caches(dtype, turned, normed, batch):
    heads = [drawn(batch, 3, h, 16, dtype=dtype).transpose(1, 2) for h in (4, 2)]
    rules = [step.NormRule(drawn(16, dtype=dtype), 1e-6) if normed and turned == 16 else None for _ in heads]
    parts = tuple(step.Part(x, rule) for x, rule in zip(heads, rules, strict=True))
    cos, sin = drawn(1, 3, turned, dtype=dtype), drawn(1, 3, turned, dtype=dtype).cos()
    compare = close if normed else same_bits
    compare(step.rotated, parts, cos, sin)
    keys, values = torch.zeros(batch, 2, 9, 16, dtype=dtype), torch.ones(batch, 2, 9, 16, dtype=dtype)
    compare(step.rotated_into, parts, cos, sin, 2 * heads[1], keys, values, torch.tensor([7, 2, 5]))
    assert keys[:, :, [0, 1, 3, 4, 6, 8]].count_nonzero() == 0 and values[:, :, 8].eq(1).all()


def same_bits(function, *args) -> None:
    assert all(torch.equal(got, want) for got, want in zip(*computed(function, *args), strict=True))


@matrix(dtype=DTYPES, function=list(GATES))
def test_gates_of_halves_of_a_tensor(dtype, function):
    joint = 2 * drawn(3, 1, 600, dtype=dtype)  # twice that, and torch itself is 5e-6 off on some CPUs
    close(step.gated, *joint.chunk(2, dim=-1), function)


@matrix(dtype=DTYPES, first=[True, False], renormalized=[True, False], experts=[8, 60])
def test_routers_choose_and_weigh_as_torch_does(dtype, first, renormalized, experts):
    logits = drawn(3, 2 * experts)[:, :experts].argsort(dim=1).to(dtype) / 8  # no two are equal
    close(step.routed, logits, step.RouteRule(4, first, renormalized, dtype))


@matrix(dtype=DTYPES, columns=[7, 300])
def test_small_products(dtype, columns):
    close(step.projected, drawn(2, columns, dtype=dtype) / 16, drawn(5, columns, dtype=dtype))


def test_gates_of_what_is_large_or_no_number():
    gate = torch.tensor([[-torch.inf, -200.0, -88.0, 0.0, 88.0, 200.0, torch.inf, torch.nan]])
    got, want = (each[0] for each in computed(step.gated, gate, torch.ones_like(gate), "silu"))
    torch.testing.assert_close(got[:, 1:], want[:, 1:], atol=1e-30, rtol=1e-6, equal_nan=True)


@matrix(dtype=DTYPES, heads=[(4, 4), (8, 2)], keys=[1, 63, 64, 300], masked=[False, True])
def test_attention_passes_over_masked_places(dtype, heads, keys, masked):
    (h, g), d = heads, 24
    q, k, v = (drawn(2, n, length, d, dtype=dtype) for n, length in ((h, 1), (g, keys), (g, keys)))
    mask = None
    if masked:
        mask = torch.rand(2, 1, 1, keys, generator=torch.Generator().manual_seed(keys)) < 0.3
        mask[..., -1] = True
        k.masked_fill_(~mask.view(2, 1, keys, 1), 1e4)  # would be seen
    close(step.attended, q, k, v, mask, 0.2)


def test_what_c_does_not_serve_is_left_to_torch():
    x, rule = drawn(2, 8).double(), step.NormRule(drawn(8).double(), 1e-5)
    assert prepare(step.normed, (x, rule), Form.of(x), torch.empty_like) is None
    y = drawn(8, 2).t()
    assert prepare(step.normed, (y, step.NormRule(None, 1e-5)), Form.of(y), torch.empty_like) is None
    q, k = drawn(1, 4, 1, 320), drawn(1, 4, 8, 320)
    assert prepare(step.attended, (q, k, k, None, 1.0), Form.of(q), torch.empty_like) is None
    assert prepare(torch.relu, (q,), Form.of(q), torch.empty_like) is None


def test_a_program_makes_its_calls_in_order_until_one_fails():
    gate, up = drawn(1, 1, 48).chunk(2, dim=-1)

    def gated(of, function):
        return prepare(step.gated, (of, up, function), Form.of(up), lambda form: torch.zeros(form.shape))

    made = [gated(gate, "relu")]
    made.append(gated(made[0].results[0], "silu"))
    first, second = (calls.results[0] for calls in made)
    program(made)()
    torch.testing.assert_close(second, torch.nn.functional.silu(gate.relu() * up) * up)
    seen = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def fails(given):
        seen.append(given)
        return 0

    failing = made[0]._replace(call=c_call(fails, made[0].held[0]), failure="no memory for it")
    first.fill_(1.0)
    second.zero_()
    with pytest.raises(MemoryError, match="no memory for it"):
        program([made[1], failing, made[0]])()
    assert seen == [ctypes.addressof(made[0].held[0])] and second.any() and first.eq(1).all()
