"""Routing: generated traces have the published reuse, files are small and checked, leases are those of layers."""

import json
import zlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbrt.errors import ArgumentError
from vbrt.residency.routing_file import read_routing, write_routing
from vbrt.residency.routing_trace import Routed, RoutedLayer, Routing, generate_routing
from vbrt.residency.simulate import PASS, Announce, Pass, best_scope, simulate

QWEN = tuple(RoutedLayer(f"model.layers.{i}.mlp.experts", 128, 8, {"coarse": 2654208}) for i in range(2))


def reuse(routing: Routing) -> Counter[int]:
    """Shares of selections by the tokens since the expert's last use."""
    (_, *passes), last, found = [r.tokens[0] for r in routing.records if isinstance(r, Routed)], {}, Counter()
    for token, chosen in enumerate(passes):
        found.update(token - last[e] for e in chosen if e in last and token >= 64)
        found[0] += len(chosen) * (token >= 64)
        last.update(dict.fromkeys(chosen, token))
    return Counter({age: n / found[0] for age, n in found.items()})


@pytest.mark.parametrize("layer", [0, 1])
def test_a_generated_routing_has_the_published_reuse(layer):
    ages = reuse(generate_routing(QWEN, tokens=600, seed=7).only(layer))
    assert ages[1] == pytest.approx(0.45, abs=0.02)
    assert sum(ages[age] for age in range(1, 9)) == pytest.approx(0.80, abs=0.02)
    assert sum(ages[age] for age in (1, 2)) > 0.5  # the median


def test_the_same_seed_gives_the_same_routing_and_every_layer_its_own():
    first = generate_routing(QWEN, tokens=20, seed=1)
    assert first == generate_routing(QWEN, tokens=20, seed=1) != generate_routing(QWEN, tokens=20, seed=2)
    assert first.only(0).records != first.only(1).records
    assert first.only(QWEN[1].name) == first.only(1) and first.tokens == 20
    with pytest.raises(ValueError, match="head: not among the layers"):
        first.only("head")
    for record in first.records:
        assert isinstance(record, Pass) or (len(record.touched) == 8 and record.touched[-1] < 128)


def test_few_experts_are_reused_more():
    mixtral = RoutedLayer("experts", 8, 2)
    assert sum(reuse(generate_routing([mixtral], tokens=300))[age] for age in range(1, 9)) > 0.8


def test_leases_are_those_of_layers_and_many_tokens_are_a_scan():
    layer = RoutedLayer("e", 6, 2, {"coarse": 10, "fine": 20})
    routing = Routing((layer,), (PASS, Routed(0, ((1, 4),)), Pass("prompt"), Routed(0, ((0, 1), (1, 5), (0, 5)))))
    keys = [layer.keys(e) for e in range(6)]
    assert list(routing.leases()) == [
        PASS,
        keys[1] + keys[4],
        Pass("prompt"),
        Announce(keys[0] + keys[1] + keys[5]),
        *(keys[0], keys[1], keys[5]),
    ]
    assert list(routing.leases(at_once=4))[-2:] == [keys[0] + keys[1], keys[5]]
    assert list(routing.leases(30))[1:4] == [Announce(keys[1] + keys[4]), keys[1], keys[4]]
    assert routing.sizes["e#fine.3"] == 20 and routing.page_bytes == 180
    counts = simulate("experts", routing.leases(), 60, sizes=routing.sizes)
    assert counts.bytes_in == 4 * 30 and counts.phases["prompt"].hits == 2


def test_simulate_reads_files_of_routing(tmp_path):
    routing = generate_routing(QWEN, tokens=30)
    write_routing(routing, tmp_path / "trace")
    room = routing.page_bytes // 4
    counts = simulate("experts", routing, room)
    assert counts == simulate("experts", tmp_path / "trace", room) == simulate("experts", str(tmp_path / "trace"), room)
    assert counts == simulate("experts", list(routing.leases()), room, sizes=routing.sizes)
    assert counts.bytes_in == counts.misses.total() * 2654208 and 0.3 < counts.hit_rate < 0.9
    with pytest.raises(ArgumentError, match="cannot read the routing"):
        simulate("experts", tmp_path / "none", room)


def test_the_better_scope_is_the_one_that_loads_fewer_bytes():
    """One layer uses all of its experts in turn, the other always the same: they should share what there is."""
    layers = (RoutedLayer("busy", 8, 1), RoutedLayer("quiet", 8, 1))
    busy, calm = (
        Routing(layers, tuple(r for t in range(60) for r in (PASS, Routed(0, ((t % n,),)), Routed(1, ((0,),)))))
        for n in (6, 2)
    )
    assert best_scope(busy, 8) == "model"
    assert best_scope(calm, 8) == "layer"


phases = st.text(max_size=9)
tokens = st.lists(st.sets(st.integers(0, 299), max_size=9).map(lambda s: tuple(sorted(s))), max_size=5).map(tuple)
records = st.lists(st.one_of(phases.map(Pass), st.builds(Routed, st.integers(0, 1), tokens)), max_size=30).map(tuple)


@given(records)
def test_a_file_gives_back_what_was_written(tmp_path_factory, written):
    layers = (RoutedLayer("a.experts", 300, 4, {"coarse": 5, "fine": 7}), RoutedLayer("b", 300, 1, {"dense": 1}))
    path = tmp_path_factory.getbasetemp() / "some.routing"
    write_routing(Routing(layers, written), path)
    assert read_routing(path) == Routing(layers, written)


def test_a_file_is_small(tmp_path):
    routing = generate_routing(QWEN, tokens=200)
    write_routing(routing, tmp_path / "t")
    assert (tmp_path / "t").stat().st_size < 200 * len(QWEN) * 6  # eight of 128 ids are 7 bytes, sets of them 5.1


def columns(*numbers: bytes) -> bytes:
    return b"".join(map(zlib.compress, numbers))


def damaged(tmp_path, change):
    path = tmp_path / "trace.routing"
    write_routing(generate_routing(QWEN, tokens=3), path)
    magic, head, body = path.read_bytes().split(b"\n", 2)
    path.write_bytes(b"\n".join(change(magic, json.loads(head), body)))
    return path


def head_of(**changes):
    return lambda magic, head, body: (
        magic,
        json.dumps({"layers": [{**each, **changes} for each in head["layers"]]}).encode(),
        body,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, h, b: (b"PK", b), "not a file of recorded routing"),
        (lambda m, h, b: (b"vbrt-routing 2", b), "of version 2; this vbrt reads version 1"),
        (lambda m, h, b: (m, json.dumps(h).encode(), b[:-3]), "the records end early"),
        (lambda m, h, b: (m, json.dumps(h).encode(), b + b"x"), "goes on behind its end"),
        (lambda m, h, b: (m, json.dumps(h).encode(), columns(b"\x01\x01", b"", b"")), "the records end early"),
        (lambda m, h, b: (m, json.dumps(h).encode(), columns(b"\x01\x01", b"\x00", b"\x02\x01")), "end early"),
        (lambda m, h, b: (m, json.dumps(h).encode(), columns(b"\x80", b"", b"")), "in the middle of a number"),
        (lambda m, h, b: (m, json.dumps(h).encode(), columns(b"\x00\x01", b"", b"")), "damaged"),
        (lambda m, h, b: (m, json.dumps(h).encode(), columns(b"\x07\x00", b"", b"")), "damaged"),
        (lambda m, h, b: (m, b"{}", b), "damaged"),
        (lambda m, h, b: (m, b"[", b), "damaged"),
        (head_of(experts=9), "which has 9"),
        (head_of(experts="128"), "a layer"),
        (head_of(page_bytes={"coarse": 0}), "a layer"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, change, message):
    path = damaged(tmp_path, change)
    with pytest.raises(ArgumentError) as caught:
        read_routing(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"none: cannot read the routing: No such file"):
        read_routing(tmp_path / "none")
    with pytest.raises(ArgumentError, match=r"missing/x: cannot write the routing: No such file"):
        write_routing(generate_routing(QWEN, tokens=1), tmp_path / "missing" / "x")
