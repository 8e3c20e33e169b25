"""One launch in the place of several: only where it has given their bits."""

import pytest
import torch

from vbrt.generation.speculation import bitwise_equivalence


@pytest.mark.parametrize(
    ("values", "called"),
    [
        ([1.0], "certain 0 certain 0 0 0"),
        ([2.0, 1.0], "certain 0 certain 1 certain 1 1"),
        ([2.0, 3.0], "certain 0 certain 1 certain certain"),
    ],
)
def test_a_way_is_trusted_after_enough_numbers_and_never_again_after_a_wrong_one(monkeypatch, values, called):
    monkeypatch.setattr(bitwise_equivalence, "_agreed", {})
    monkeypatch.setattr(bitwise_equivalence, "_ENOUGH", 6)
    calls = []

    def way(name, value):
        return lambda: (calls.append(name), torch.full((3,), value))[1]

    before = bitwise_equivalence.comparisons()
    ways = [way(str(place), value) for place, value in enumerate(values)]
    for _ in range(4):
        assert torch.equal(
            bitwise_equivalence.first_that_agrees(("product",), ways, way("certain", 1.0)), torch.ones(3)
        )
    assert calls == called.split()
    assert bitwise_equivalence.comparisons() - before == len(calls) - 4


def test_forms_differ_where_shapes_types_or_strides_do():
    x = torch.ones(4, 4)
    forms = {bitwise_equivalence.form_of(each) for each in (x, x[:2], x.half(), x[:, ::2], x[::2, :2], None, -1)}
    assert len(forms) == 7 and bitwise_equivalence.form_of(x) == bitwise_equivalence.form_of(x + 1)
