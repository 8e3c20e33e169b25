"""`place`: which tier is the home of each page, and every way in which there is none."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbrt.config.tier_records import TIERS
from vbrt.errors import ConfigError
from vbrt.residency.plan import PageSpec, Plan, Skip, Swap, format_bytes, leased_pages, place
from vbrt.residency.weight_site import WeightSite

PAGE = 4096


def layers(*sizes: int | tuple[int, ...]) -> list[list[PageSpec]]:
    """Layers by the sizes of their planes, in pages."""
    planes = [size if isinstance(size, tuple) else (size,) for size in sizes]
    return [
        [PageSpec(f"layer{i}#{'cf'[j]}", "cf"[j], size * PAGE) for j, size in enumerate(layer)]
        for i, layer in enumerate(planes)
    ]


def budgets(**pages: float) -> dict[str, int]:
    return {tier: int(count * PAGE) for tier, count in pages.items()}


def held(homes: dict[str, str], model: list[list[PageSpec]], tier: str) -> int:
    """Bytes that live in a tier, file headers included."""
    sizes = {page.key: page.nbytes + TIERS[tier].overhead_bytes for layer in model for page in layer}
    return sum(sizes[key] for key, home in homes.items() if home == tier)


def test_everything_lives_in_the_computing_tier_when_it_fits():
    model = layers(2, 3, 1)
    assert set(place(model, budgets(gpu=6, cpu=100, ssd=100), source="x").values()) == {"gpu"}
    assert set(place(model, budgets(cpu=6), source="x").values()) == {"cpu"}


def test_everything_lives_in_the_first_tier_that_holds_it_all():
    model = layers(2, 3, 1)
    assert set(place(model, budgets(gpu=3, cpu=6, ssd=100), source="x").values()) == {"cpu"}
    assert set(place(model, budgets(gpu=3, cpu=5.9, ssd=100), source="x").values()) == {"ssd"}
    assert set(place(model, budgets(cpu=3, ssd=9), source="x").values()) == {"ssd"}


def test_neighbours_memory_fills_before_host_memory_is_asked():
    model = layers(*[1] * 20)
    both = place(model, budgets(gpu=12, peer=12), source="x")
    assert (held(both, model, "peer"), held(both, model, "gpu")) == (12 * PAGE, 8 * PAGE)
    three = place(model, budgets(gpu=8, peer=6, cpu=100, ssd=100), source="x")
    assert [held(three, model, tier) // PAGE for tier in ("gpu", "peer", "cpu")] == [4, 6, 10]  # four pages may pass
    assert set(place(model, budgets(gpu=20, peer=12, cpu=100), source="x").values()) == {"gpu"}
    with pytest.raises(ConfigError, match=r"the pages take .* the tiers hold gpu .* \+ peer"):
        place(model, budgets(gpu=4, peer=12), source="x")


def test_files_cost_their_headers():
    model = layers(2, 2)
    assert set(place(model, budgets(cpu=3, ssd=6), source="x").values()) == {"ssd"}
    assert set(place(model, budgets(cpu=4, ssd=6), source="x").values()) == {"cpu"}
    with pytest.raises(ConfigError, match="the pages take"):
        place(model, budgets(cpu=3, ssd=5.9), source="x")


def test_without_pages_there_is_nothing_to_place():
    assert place([], budgets(cpu=0), source="x") == {}
    assert place([], {}, source="x") == {}


def test_what_the_last_tier_cannot_hold_lives_above_it_and_a_lease_can_still_pass():
    model = layers(*[1] * 12)
    homes = place(model, budgets(gpu=4, cpu=5, ssd=10), source="x")  # 5 files, 4 beside one passing, 3 beside one
    assert [list(homes.values()).count(tier) for tier in ("gpu", "cpu", "ssd")] == [3, 4, 5]
    places = [i for i, layer in enumerate(model) if homes[layer[0].key] == "ssd"]
    gaps = {after - before for before, after in pairwise(places)}
    assert max(gaps) - min(gaps) <= 1  # spread, so that the disk has time to keep up
    with pytest.raises(ConfigError, match="the pages take"):
        place(layers(*[1] * 13), budgets(gpu=4, cpu=5, ssd=10), source="x")


def test_a_single_tier_that_is_too_small_says_what_would_do():
    with pytest.raises(ConfigError) as caught:
        place(layers(4, 4), budgets(cpu=7), source="my.toml")
    message = str(caught.value)
    assert message.startswith("my.toml: the pages take 32.0 KiB, the tiers hold cpu 28.0 KiB")
    for remedy in ("tiers.*.budget", "tiers.ssd", "weights.format"):
        assert remedy in message


@pytest.mark.parametrize(
    ("given_budgets", "tier"),
    [
        ({"gpu": 4, "cpu": 100}, "gpu"),
        ({"gpu": 50, "cpu": 4, "ssd": 200}, "cpu"),
        ({"cpu": 4, "ssd": 200}, "cpu"),
        ({"gpu": 4, "cpu": 58, "ssd": 1}, "gpu"),
    ],
)
def test_a_tier_smaller_than_the_largest_layer_that_must_pass_is_refused_by_name(given_budgets, tier):
    model = layers(*[10] * 5, (3, 2), 4) if tier != "cpu" or "gpu" in given_budgets else layers(*[1] * 9, (3, 2))
    with pytest.raises(ConfigError) as caught:
        place(model, budgets(**given_budgets), source="preset fp4")
    message = str(caught.value)
    assert message.startswith(f"preset fp4: tiers.{tier}.budget = {given_budgets[tier] * PAGE} bytes is smaller than")
    largest = max(model, key=lambda layer: sum(page.nbytes for page in layer))
    assert largest[0].key in message and str(sum(page.nbytes for page in largest)) in message
    assert "weights.exclude" in message


def test_a_tier_below_all_homes_may_be_of_any_size():
    assert set(place(layers(5, 5), budgets(gpu=10, cpu=0, ssd=0), source="x").values()) == {"gpu"}


@given(
    sizes=st.lists(st.tuples(st.integers(1, 5)) | st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=12),
    gpu=st.integers(0, 40),
    cpu=st.integers(0, 40),
    ssd=st.integers(0, 60),
    tiers=st.sampled_from([("gpu",), ("cpu",), ("gpu", "cpu"), ("cpu", "ssd"), ("gpu", "cpu", "ssd")]),
)
def test_homes_fit_and_leave_room_to_pass(sizes, gpu, cpu, ssd, tiers):
    model, room = layers(*sizes), {"gpu": gpu, "cpu": cpu, "ssd": ssd}
    given_budgets = budgets(**{tier: room[tier] for tier in tiers})
    try:
        homes = place(model, given_budgets, source="x")
    except ConfigError:
        total = sum(page.nbytes for layer in model for page in layer)
        assert total > given_budgets[tiers[0]]  # what fits on top is never refused
        return
    assert set(homes) == {page.key for layer in model for page in layer}
    for depth, tier in enumerate(tiers):
        leased = (sum(page.nbytes for page in layer if tiers.index(homes[page.key]) > depth) for layer in model)
        assert held(homes, model, tier) + max(leased, default=0) <= given_budgets[tier]


def test_a_table_that_is_read_by_rows_may_be_larger_than_what_it_would_pass_through():
    table, layer = PageSpec("table#dense", "dense", 64 * PAGE), PageSpec("layer#dense", "dense", 2 * PAGE)
    budgets = {"gpu": 4 * PAGE, "cpu": 128 * PAGE}
    with pytest.raises(ConfigError, match="smaller than the largest layer's pages"):
        place([[table], [layer]], budgets, source="x")
    homes = place([[replace(table, by_rows=True)], [layer]], budgets, source="x")
    assert homes == {"table#dense": "cpu", "layer#dense": "gpu"}
    swap = replace(a_swap("table", (replace(table, by_rows=True),)), note="")
    plan = Plan((swap, a_swap("layer", (layer,))), {}, budgets)
    assert swap.by_rows and (plan.group, plan.largest_layer_bytes, plan.largest_page_bytes) == (1, 2 * PAGE, 2 * PAGE)


def routed(name: str, sizes: list[int], top_k: int) -> list[PageSpec]:
    """The pages of a layer of routed experts, by the size of each expert's in pages."""
    return [PageSpec(f"{name}#c.{e}", "c", size * PAGE, top_k=top_k) for e, size in enumerate(sizes)]


def test_a_lease_of_routed_experts_takes_as_many_pages_as_a_token_needs():
    experts, layer = routed("experts", [2, 1, 2, 3], top_k=2), layers(4)[0]
    tight = budgets(gpu=5, cpu=100)
    assert set(place([experts, layer], tight, source="x").values()) == {"cpu"}
    with pytest.raises(ConfigError, match=r"experts#c\.3, those of the 2 experts that one token goes to: 20480 bytes"):
        place([experts, layer], budgets(gpu=4.9, cpu=100), source="x")
    swap = replace(a_swap("experts", tuple(experts)), experts=4, top_k=2)
    plan = Plan((swap, a_swap("layer", tuple(layer))), {}, tight)
    assert (plan.group, plan.largest_layer_bytes, plan.largest_page_bytes) == (2, 5 * PAGE, 4 * PAGE)
    assert (swap.to_dict()["experts"], swap.to_dict()["top_k"], swap.page_bytes) == (4, 2, 8 * PAGE)


def test_a_lease_takes_every_plane_of_its_experts():
    coarse, fine = routed("experts", [1] * 8, top_k=3), routed("experts", [2] * 8, top_k=3)
    pages = [*coarse, *(replace(page, plane="f", key=page.key.replace("#c", "#f")) for page in fine)]
    assert sum(page.nbytes for page in leased_pages(pages)) == 9 * PAGE and len(leased_pages(pages)) == 6


def where(homes: dict[str, str]) -> dict[str, set[str]]:
    """The homes of experts and of other layers."""
    found: dict[str, set[str]] = {"experts": set(), "others": set()}
    for key, home in homes.items():
        found["experts" if "experts" in key else "others"].add(home)
    return found


@pytest.mark.parametrize(
    ("room", "experts", "others"),
    [
        ({"gpu": 17, "cpu": 100}, {"gpu"}, {"gpu"}),
        ({"gpu": 16, "cpu": 100}, {"cpu"}, {"gpu"}),
        ({"gpu": 7, "cpu": 12}, {"cpu"}, {"gpu"}),  # one token's experts beside the rest
        ({"gpu": 6, "cpu": 100}, {"cpu"}, {"cpu"}),
        ({"gpu": 3, "cpu": 100}, {"cpu"}, {"cpu"}),
        ({"gpu": 16, "cpu": 4, "ssd": 100}, {"ssd"}, {"gpu"}),
        ({"gpu": 16, "cpu": 8, "ssd": 15}, {"cpu", "ssd"}, {"gpu"}),  # 8 files, the others above
        ({"gpu": 16, "cpu": 5}, {"gpu", "cpu"}, {"gpu"}),
    ],
)
def test_what_every_pass_needs_lives_on_top_and_experts_below_where_not_all_fits(room, experts, others):
    model = [*layers(3, 2), routed("experts", [1] * 12, top_k=2)]
    homes = place(model, budgets(**room), source="x")
    assert where(homes) == {"experts": experts, "others": others}
    assert len(homes) == 14


@pytest.mark.parametrize(
    ("room", "table", "others", "experts"),
    [
        ({"gpu": 19, "cpu": 99}, "gpu", {"gpu"}, {"gpu"}),
        ({"gpu": 16, "cpu": 99}, "cpu", {"gpu"}, {"gpu"}),  # all but the table fit
        ({"gpu": 14, "cpu": 99}, "cpu", {"gpu"}, {"cpu"}),
        ({"gpu": 14, "cpu": 15, "ssd": 99}, "ssd", {"gpu"}, {"cpu"}),
        ({"gpu": 14, "cpu": 5, "ssd": 99}, "ssd", {"gpu"}, {"ssd"}),  # the cpu tier is the experts' cache
    ],
)
def test_tables_that_are_read_by_rows_make_room_for_what_moves(room, table, others, experts):
    rows = PageSpec("table#coarse", "coarse", 4 * PAGE, by_rows=True)
    homes = place([[rows], *layers(3), routed("experts", [1] * 12, top_k=2)], budgets(**room), source="x")
    assert homes.pop("table#coarse") == table and where(homes) == {"experts": experts, "others": others}


def test_tables_that_fit_nowhere_are_refused():
    table = PageSpec("table#coarse", "coarse", 40 * PAGE, by_rows=True)
    with pytest.raises(ConfigError, match=r"the pages take 172\.0 KiB, the tiers hold gpu 40\.0 KiB \+ cpu 100\.0 KiB"):
        place([[table], *layers(3)], budgets(gpu=10, cpu=25), source="x")


def test_experts_that_fit_nowhere_are_refused():
    with pytest.raises(ConfigError, match=r"the pages take 48\.0 KiB, the tiers hold gpu 20\.0 KiB \+ cpu 20\.0 KiB"):
        place([*layers(3), routed("experts", [1] * 12, top_k=2)], budgets(gpu=8, cpu=5), source="x")


def a_swap(name: str, pages: tuple[PageSpec, ...]) -> Swap:
    return Swap(WeightSite(name, (64, 64)), "float32", dense_bytes=16384, format="nvfp4", fine="none", pages=pages)


def test_a_plan_adds_up_and_is_plain_data():
    pages = (PageSpec("a#coarse", "coarse", 4096, "gpu"), PageSpec("a#fine", "fine", 8192, "cpu"))
    swaps = (a_swap("a", pages), a_swap("b", (PageSpec("b#coarse", "coarse", 4096, "cpu"),)))
    plan = Plan(swaps, {"head": Skip(1000, "output head")}, {"gpu": 10000, "cpu": 20000}, ("a note",))
    assert plan.compute_tier == "gpu" and plan.group == 2
    assert (plan.swapped_bytes, plan.kept_bytes, plan.dense_bytes) == (32768, 1000, 33768)
    assert (plan.page_bytes, plan.home_bytes("gpu"), plan.home_bytes("cpu")) == (16384, 4096, 12288)
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["page_bytes"] == 16384 and data["skipped"]["head"]["reason"] == "output head"
    assert data["swaps"][0]["pages"][1]["home"] == "cpu" and data["notes"] == ["a note"]
    assert replace(plan, swaps=()).group == 1


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 40, "5.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes_are_written_for_people(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("room", "coarse", "fine"),
    [
        ({"gpu": 18, "cpu": 100}, {"gpu"}, {"gpu"}),
        ({"gpu": 14, "cpu": 100}, {"gpu"}, {"cpu"}),  # four fine pages beside the coarse ones
        ({"gpu": 13, "cpu": 100}, {"cpu"}, {"cpu"}),
        ({"gpu": 14, "cpu": 8, "ssd": 100}, {"gpu"}, {"ssd"}),
        ({"gpu": 14, "cpu": 12}, {"gpu"}, {"cpu"}),  # the coarse ones take no host memory
    ],
)
def test_coarse_planes_of_exact_weights_live_on_top_where_fine_ones_can_pass_beside_them(room, coarse, fine):
    model = [
        [PageSpec(f"layer{n}#coarse", "coarse", PAGE), PageSpec(f"layer{n}#fine", "fine", 2 * PAGE)] for n in range(6)
    ]
    homes = place(model, budgets(**room), source="x")
    assert {home for key, home in homes.items() if "coarse" in key} == coarse
    assert {home for key, home in homes.items() if "fine" in key} == fine
