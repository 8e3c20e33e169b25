"""Some rows of a weight from its planes: the bits that the whole weight has."""

import pytest
import torch

from vbrt.formats import code_fine, get_format, row_decoding
from vbrt.formats.fine_plane import fine_layout, split_fine
from vbrt.formats.row_decoding import Rows, coarse_rows, exact_rows

INDEX = torch.tensor([0, 3, 0, 1])


def rows_of(layout, tensors):
    def take(field, index):
        tensor = tensors[field]
        plain = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        return plain[index].view(tensor.dtype)

    return Rows(layout, take)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4", "quantile", "mxint8"])
def test_rows_of_a_coarse_plane_decode_to_those_of_the_whole_weight(format):
    fmt, weight = get_format(format), torch.randn(5, 72)
    coarse = fmt.encode(weight)
    some = coarse_rows(rows_of(fmt.layout((5, 72), torch.float32), coarse), INDEX)
    assert torch.equal(fmt.decode(some, (4, 72), torch.float32), fmt.decode(coarse, (5, 72), torch.float32)[INDEX])


@pytest.mark.sample(12)
@pytest.mark.parametrize("columns", [33, 768, 4096, 5000])  # rows that begin anywhere in a span of 4096
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["nvfp4", "quantile"])
@pytest.mark.parametrize("as_on", ["cpu", "gpu"])
def test_rows_of_both_planes_are_the_originals_bit_for_bit(format, dtype, columns, as_on, monkeypatch):
    if as_on == "gpu":
        monkeypatch.setattr(row_decoding, "_take_counted", row_decoding._take_for_all)
    monkeypatch.setattr("vbrt.formats.row_decoding._CHUNK_WEIGHTS", 3 * columns)
    torch.manual_seed(0)
    weight = (torch.randn(9, columns) * torch.exp(2 * torch.randn(9, columns)) / 100).to(dtype)
    weight[0, :5] = 0
    fmt, index = get_format(format), torch.tensor([8, 0, 1, 4, 8])
    coarse = fmt.encode(weight)
    fine = split_fine(weight, coarse, fmt)
    assert len(fine["escapes" if format == "quantile" else "side"])
    planes = rows_of(fmt.layout((9, columns), dtype), coarse), rows_of(fine_layout(fine), fine)
    found = exact_rows(*planes, fmt, (9, columns), dtype, index)
    assert torch.equal(found.view(torch.int16), weight[index].view(torch.int16))


@pytest.mark.sample(8)
@pytest.mark.parametrize("columns", [33, 768, 4096, 5000])
@pytest.mark.parametrize("format", ["nvfp4", "nf4"])
@pytest.mark.parametrize("as_on", ["cpu", "gpu"])
def test_rows_of_a_coded_plane_are_the_originals_bit_for_bit(format, columns, as_on, monkeypatch):
    if as_on == "gpu":
        monkeypatch.setattr(row_decoding, "_take_counted", row_decoding._take_for_all)
    monkeypatch.setattr("vbrt.formats.row_decoding._CHUNK_WEIGHTS", 3 * columns)
    torch.manual_seed(0)
    weight = (torch.randn(9, columns) * torch.exp(2 * torch.randn(9, columns)) / 100).bfloat16()
    weight[0, :5] = 0
    fmt, index = get_format(format), torch.tensor([8, 0, 1, 4, 8])
    coarse = fmt.encode(weight)
    fine = code_fine(weight, coarse, fmt)
    assert len(fine["escapes"])
    planes = rows_of(fmt.layout((9, columns), weight.dtype), coarse), rows_of(fine_layout(fine), fine)
    found = exact_rows(*planes, fmt, (9, columns), weight.dtype, index)
    assert torch.equal(found.view(torch.int16), weight[index].view(torch.int16))
