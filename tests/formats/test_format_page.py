import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vbrt.errors import FormatError
from vbrt.formats import FIELD_ALIGN, PAGE_ALIGN, Field, PageLayout, build_layout, new_page, pack, unpack

LAYOUT = build_layout(
    "f", "coarse", [("codes", "uint8", (3, 5)), ("scales", "float8_e4m3fn", (3, 1)), ("t", "float32", (1,))]
)


def sample_tensors(layout):
    torch.manual_seed(0)
    bytes_of = {f.name: torch.randint(0, 120, (f.nbytes,), dtype=torch.uint8) for f in layout.fields}
    return {f.name: bytes_of[f.name].view(getattr(torch, f.dtype)).view(f.shape) for f in layout.fields}


def test_fields_start_at_multiples_of_256_and_pages_end_at_multiples_of_4096():
    assert [f.offset for f in LAYOUT.fields] == [0, 256, 512]
    assert LAYOUT.nbytes == 4096
    assert build_layout("f", "p", [("a", "uint8", (4096,)), ("b", "uint8", (1,))]).nbytes == 8192


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["uint8", "int8", "int16", "bfloat16", "float16", "float32", "float8_e4m3fn"]),
            st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_unpack_gives_back_what_pack_was_given(specs):
    layout = build_layout("f", "p", [(str(i), dtype, shape) for i, (dtype, shape) in enumerate(specs)])
    tensors = sample_tensors(layout)
    views = unpack(pack(tensors, layout, new_page(layout)), layout)
    assert list(views) == [f.name for f in layout.fields]
    for name, tensor in tensors.items():
        assert views[name].dtype == tensor.dtype and views[name].shape == tensor.shape
        assert torch.equal(views[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_unpack_views_the_page_without_copying():
    page = pack(sample_tensors(LAYOUT), LAYOUT, new_page(LAYOUT))
    views = unpack(page, LAYOUT)
    views["t"].fill_(7.5)
    assert page[512:516].view(torch.float32).item() == 7.5
    assert views["codes"].data_ptr() == page.data_ptr()


def test_unpack_reads_a_page_that_is_a_slice_of_a_slab():
    slab = torch.zeros(3 * LAYOUT.nbytes, dtype=torch.uint8)
    tensors = sample_tensors(LAYOUT)
    page = pack(tensors, LAYOUT, slab[LAYOUT.nbytes : 2 * LAYOUT.nbytes])
    assert all(torch.equal(v.view(torch.uint8), tensors[k].view(torch.uint8)) for k, v in unpack(page, LAYOUT).items())
    assert not slab[: LAYOUT.nbytes].any() and not slab[2 * LAYOUT.nbytes :].any()


def test_new_page_is_zeroed_and_aligned_for_direct_io():
    for _ in range(5):
        page = new_page(LAYOUT)
        assert page.data_ptr() % PAGE_ALIGN == 0 and page.shape == (LAYOUT.nbytes,) and not page.any()


def test_equal_tensors_give_equal_bytes_in_a_used_page():
    fresh = pack(sample_tensors(LAYOUT), LAYOUT, new_page(LAYOUT))
    used = pack(sample_tensors(LAYOUT), LAYOUT, new_page(LAYOUT).fill_(255))
    assert torch.equal(fresh, used)


def test_a_layout_survives_dict_and_pickle():
    assert PageLayout.from_dict(LAYOUT.to_dict()) == LAYOUT
    assert pickle.loads(pickle.dumps(LAYOUT)) == LAYOUT
    page = pack(sample_tensors(LAYOUT), LAYOUT, new_page(LAYOUT))
    assert unpack(page, pickle.loads(pickle.dumps(LAYOUT)))["codes"].shape == (3, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version 99"),
        ({"version": None}, "version None"),
        ({"fields": [["a", "uint7", [1], 0]]}, "uint7"),
        ({"fields": [["a", "uint8", [1], 3]]}, f"multiple of {FIELD_ALIGN}"),
        ({"fields": [["a", "uint8", [-1], 0]]}, "shape"),
        ({"fields": [["a", "uint8", [300], 0], ["b", "uint8", [1], 256]]}, "not below 300"),
        ({"fields": [["a", "uint8", [5000], 0]]}, "page of 4096 bytes"),
        ({"nbytes": 4095}, f"multiple of {PAGE_ALIGN}"),
        ({"fields": 3}, "to_dict"),
        ({"nbytes": None}, "nbytes = None: TypeError.*to_dict"),
        ({"nbytes": "much"}, r"nbytes = much: ValueError.*to_dict"),
        ({"nbytes": float("nan")}, r"nbytes = nan: ValueError"),
        ({"nbytes": float("inf")}, r"nbytes = inf: OverflowError"),
        (
            {"fields": [["a", "uint8", [1], 0], ["b", "uint8", ["x"], 256]]},
            r"fields\[1\] = \['b', 'uint8', \['x'\], 256\]: Val",
        ),
        ({"fields": [["a", "uint8", [1]]]}, r"fields\[0\] = .*: ValueError\('not enough values"),
        ({"fields": ["abcde"]}, r"fields\[0\] = abcde: ValueError\('too many values"),
    ],
)
def test_a_malformed_layout_is_refused(change, message):
    with pytest.raises(FormatError, match=message):
        PageLayout.from_dict(LAYOUT.to_dict() | change)


@pytest.mark.parametrize("data", [None, [], "layout"])
def test_what_is_no_mapping_is_refused(data):
    with pytest.raises(FormatError, match="version None"):
        PageLayout.from_dict(data)


def test_a_layout_without_its_fields_is_refused():
    with pytest.raises(FormatError, match="fields"):
        PageLayout.from_dict({"version": 1, "format": "f", "plane": "p", "nbytes": 4096})


def test_a_layout_of_another_version_cannot_be_built():
    with pytest.raises(FormatError, match="version 2"):
        replace(LAYOUT, version=2)
    with pytest.raises(FormatError, match="complex64"):
        build_layout("f", "p", [("a", "complex64", (1,))])
    with pytest.raises(FormatError, match="'a'"):
        PageLayout("f", "p", (Field("a", "uint8", (1,), 1),), 4096)


@pytest.mark.parametrize(
    "page",
    [
        torch.zeros(LAYOUT.nbytes - 1, dtype=torch.uint8),
        torch.zeros(LAYOUT.nbytes),
        torch.zeros(1, LAYOUT.nbytes, dtype=torch.uint8),
        torch.zeros(2 * LAYOUT.nbytes, dtype=torch.uint8)[::2],
    ],
)
def test_a_page_of_another_shape_dtype_or_stride_is_refused(page):
    with pytest.raises(FormatError, match="expected contiguous"):
        unpack(page, LAYOUT)
    with pytest.raises(FormatError, match="expected contiguous"):
        pack(sample_tensors(LAYOUT), LAYOUT, page)


def test_pack_refuses_missing_extra_and_wrong_tensors():
    tensors = sample_tensors(LAYOUT)
    for wrong in (
        {k: v for k, v in tensors.items() if k != "t"},
        tensors | {"more": tensors["t"]},
        tensors | {"t": tensors["t"].half()},
        tensors | {"codes": tensors["codes"].T},
    ):
        with pytest.raises(FormatError, match="expected"):
            pack(wrong, LAYOUT, new_page(LAYOUT))
