"""Memory for decoded weights, used again."""

import copy
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import vbrt
from vbrt.kernels import kernel_refusal
from vbrt.kernels.cpu import buffer_reuse

WHY = kernel_refusal(torch.device("cpu"))
built = pytest.mark.skipif(WHY is not None, reason=str(WHY))


@built
def test_a_large_weight_is_decoded_into_memory_that_an_earlier_one_has_left():
    shape = (4096, 4096)
    first = buffer_reuse.empty(shape, torch.bfloat16)
    part, where = first.fill_(1)[5:, 7:], first.data_ptr()
    del first
    second = buffer_reuse.empty(shape, torch.bfloat16).fill_(2)
    assert second.data_ptr() != where and bool((part == 1).all())  # somebody still holds a part of it
    del part
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    third = buffer_reuse.empty(shape, torch.bfloat16).fill_(3)
    assert third.data_ptr() == where and resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000
    assert bool((second == 2).all())


def test_threads_never_get_memory_that_another_still_holds(monkeypatch):
    monkeypatch.setattr(buffer_reuse, "_SMALLEST_BYTES", 1)

    def fill_and_look(number):
        held = []
        for turn in range(300):
            held = [*held[-(turn % 5) :], buffer_reuse.empty((4096 * (1 + turn % 3),), torch.uint8).fill_(number)[7:]]
            assert all(bool((part == number).all()) for part in held)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fill_and_look, range(1, 5)))
    buffer_reuse.trim()
    assert not buffer_reuse._loans


@built
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_layers_compute_the_same_in_memory_that_is_used_again(mode, monkeypatch):
    monkeypatch.setattr(buffer_reuse, "_SMALLEST_BYTES", 1)
    plain = torch.nn.Sequential(*(torch.nn.Linear(80, 80) for _ in range(4))).bfloat16().eval()
    x = torch.randn(3, 80).bfloat16()
    with mode(), vbrt.wrap(copy.deepcopy(plain), "exact", weights={"min_parameters": 1}) as vb:
        for _ in range(3):
            assert torch.equal(vb(x), plain(x))
        weights = [layer.weight for layer in vb.module]
        vb(x)
        assert all(torch.equal(weight, layer.weight) for weight, layer in zip(weights, plain, strict=True))


def test_memory_for_decoded_weights_is_bounded_and_can_be_given_back():
    shapes = [((16 << 20) + 4096 * i,) for i in range(8)]
    for shape in shapes * 2:
        buffer_reuse.empty(shape, torch.uint8)
    assert len(buffer_reuse._free) + len(buffer_reuse._ended) <= buffer_reuse._BLOCKS + 1
    buffer_reuse.trim()
    assert not buffer_reuse._free and not buffer_reuse._ended and not buffer_reuse._loans
    buffer_reuse.empty(*shapes[:1], torch.uint8)
    with vbrt.wrap(torch.nn.Sequential(torch.nn.Linear(64, 64)).eval(), "fp4"):
        pass
    assert not buffer_reuse._free and not buffer_reuse._ended
