"""Tokens in codes that are written and read by number: what `vbrt.KVCache`'s pages give, token for token."""

import pytest
import torch

from vbrt.generation.kv.paged_codes import PagedCodes
from vbrt.generation.kv.quantized import KVShape, page_code
from vbrt.kernels.cuda import kv_pages

PAGE, LAYERS, HEADS, K, V = 128, 2, 2, 32, 64
STRIDE = 2 * PAGE * LAYERS  # rows of a block, as transformers counts them


class Sequences:
    """A cache of some sequences, with blocks in any order, and what was written to it."""

    def __init__(self, bits, *, window=None, blocks=24, sequences=4):
        self.code = page_code(KVShape(1, HEADS, PAGE, K, V, torch.bfloat16), bits)
        pages = torch.zeros(blocks, LAYERS, self.code.page_bytes, dtype=torch.uint8)
        self.tokens = PagedCodes(self.code, sequences).over(pages, STRIDE, window)
        self.window, self.alive, self.past = window, {}, {}
        self.free = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(0)).add(1).tolist()

    def rows(self, name, first, count):
        places = [at % self.window if self.window else at for at in range(first, first + count)]
        table = self.alive.setdefault(name, [])
        while places and len(table) <= max(places) // PAGE:
            table.append(self.free.pop())
        return [table[at // PAGE] * STRIDE + at % PAGE for at in places]

    def leave(self, name):
        self.free += self.alive.pop(name)
        del self.past[name]

    def step(self, new, scale=1):
        """Write new normal numbers times `scale`; return keys and values [L, N, H, D] that each sequence then has."""
        writes, reads, pairs, ends = [], [], [], []
        for name, count in new.items():
            old = self.past.get(name)
            past = 0 if old is None else old[0].shape[1]
            pair = tuple((scale * torch.randn(LAYERS, count, HEADS, dim)).bfloat16() for dim in (K, V))
            kept = min(count, self.window or count)
            rows = [PAGE - 1] * (count - kept) + self.rows(name, past + count - kept, kept)  # block 0: nobody's
            writes += self.tokens.marked_writes(name, rows, past, self.alive)
            self.past[name] = pair if old is None else tuple(torch.cat(x, 1) for x in zip(old, pair, strict=True))
            pairs.append(pair)
            length = past + count
            seen = min(length, self.window or length)
            reads += self.tokens.marked_reads(name, self.rows(name, length - seen, seen), length)
            ends.append(seen)
        self.tokens.begin(torch.tensor(writes), torch.empty(0, dtype=torch.int64))
        for layer in range(LAYERS):
            self.tokens.write(layer, *(torch.cat([pair[n][layer] for pair in pairs]) for n in (0, 1)))
        self.tokens.begin(torch.empty(0, dtype=torch.int64), torch.tensor(reads))
        found = [[x.split(ends) for x in self.tokens.read(layer)] for layer in range(LAYERS)]
        return {
            name: tuple(torch.stack([found[layer][n][i] for layer in range(LAYERS)]) for n in (0, 1))
            for i, name in enumerate(new)
        }

    def decoded(self, name):
        """All tokens after their codes of whole pages [L, T, H, D], the last of which is filled up with zeros."""
        keys, values = (x.transpose(1, 2) for x in self.past[name])
        more = -keys.shape[2] % PAGE
        pair = [torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (keys, values)]
        out = [torch.empty_like(x) for x in pair]
        for layer in range(LAYERS):
            pages = self.code.encode(*(x[layer : layer + 1] for x in pair))
            self.code.decode(pages, tuple(x[layer : layer + 1] for x in out))
        return [x[:, :, : keys.shape[2]].transpose(1, 2) for x in out]

    def expected(self, name):
        """Keys of full groups and all values from codes, the last keys as they were written."""
        keys, values = self.decoded(name)
        sealed = keys.shape[1] // self.code.token_group * self.code.token_group
        return torch.cat((keys[:, :sealed], self.past[name][0][:, sealed:]), 1), values


@pytest.mark.parametrize("bits", [8, 4])
def test_tokens_are_those_of_kv_cache_pages_as_sequences_enter_grow_and_leave(bits):
    torch.manual_seed(0)
    cache = Sequences(bits)
    for number, new in enumerate(
        [{"a": 1, "b": 300}, {"a": 62, "b": 1, "c": 64}, {"b": 83, "a": 1}, {"a": 1, "c": 1}, {"d": 129, "a": 191}]
        + [{"a": 1, "b": 1, "d": 1}] * 70
    ):
        found = cache.step(new)
        for name in new:
            for got, wanted in zip(found[name], cache.expected(name), strict=True):
                assert torch.equal(got, wanted), (number, name)
        if number == 3:
            cache.leave("c")  # d takes its blocks and its tail
    assert cache.tokens._tails.shape[1] == 5 * cache.code.token_group


@pytest.mark.parametrize(("bits", "window"), [(8, 192), (4, 192), (4, 100), (4, 50)])
def test_a_window_reads_its_last_tokens_within_the_bound_of_the_codes(bits, window):
    torch.manual_seed(0)
    cache = Sequences(bits, window=window)
    steps = [{"a": 30, "b": 5}, {"a": window - 31}, {"a": 1, "b": window}, {"a": 64}]
    cache.step({"a": 0, "b": 0, "z": 41}, scale=1e4)
    cache.leave("z")  # c takes its tail, with keys that are in none of its groups
    for new in [*steps, {"c": 3 * window + 7, "a": 20}, *([{"a": 1, "c": 1, "b": 3}] * (2 * window))]:
        for name, pair in cache.step(new).items():
            for got, written in zip(pair, cache.past[name], strict=True):
                wanted = written[:, -got.shape[1] :].float()
                step = 10 / ((1 << bits) - 1)  # the range of a group of normal numbers, at most
                assert (got.float() - wanted).abs().max() < step / 2 + 0.02
            waiting = (cache.past[name][0].shape[1] % window) % cache.code.token_group
            if waiting:
                assert torch.equal(pair[0][:, -waiting:], cache.past[name][0][:, -waiting:])


def test_a_fork_has_the_waiting_keys_of_its_source_and_tails_grow():
    torch.manual_seed(0)
    cache = Sequences(4, sequences=1)
    cache.step({"a": 70})
    cache.alive["b"] = list(cache.alive["a"])  # as if the blocks were copied: none is written by both below
    cache.tokens.fork("a", "b", cache.alive)
    cache.tokens.copy_tails()
    cache.past["b"] = cache.past["a"]
    found = cache.step({"b": 1})["b"]
    assert torch.equal(found[0][:, 64:], cache.past["b"][0][:, 64:])
    found = cache.step({"a": 1})["a"]
    assert torch.equal(found[0][:, 64:], cache.past["a"][0][:, 64:])  # not b's
    assert cache.tokens._tails.shape[1] == 4 * cache.code.token_group


def test_pages_take_half_and_less_than_a_third_of_the_bytes():
    shape = KVShape(1, 8, 256, 128, 128, torch.bfloat16)
    ratios = [shape.plain_bytes / PagedCodes(page_code(shape, bits), 1).page_bytes for bits in (8, 4)]
    assert ratios[0] > 1.88 and ratios[1] > 3.55


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [64, 96, 128])
def test_a_gpu_writes_and_reads_what_a_cpu_does(bits, width):
    torch.manual_seed(0)
    code = page_code(KVShape(1, 8, 256, width, width, torch.bfloat16), bits)
    keys, values = torch.randn(2, 1, 700, 8, width).bfloat16()
    rows = [row for block in (3, 1, 4) for row in range(block * 512, block * 512 + 256)][:700]
    found = []
    for device in ("cpu", "cuda"):
        pages = torch.zeros(5, 1, code.page_bytes, dtype=torch.uint8, device=device)
        tokens = PagedCodes(code, 2).over(pages, 512)
        marked = [
            torch.tensor(rows, device=device)
            for rows in (
                tokens.marked_writes("a", list(rows), 0, {"a": ()}),
                tokens.marked_reads("a", list(rows), len(rows)),
            )
        ]
        tokens.begin(*marked)
        tokens.write(0, keys[0].to(device), values[0].to(device))
        assert kv_pages.gathers(tokens._layers[0][0]) == (device == "cuda")
        found.append([x.cpu() for x in tokens.read(0)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
