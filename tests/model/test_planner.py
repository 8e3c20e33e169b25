"""The plan: every byte is accounted for once, and every refusal has a reason that says why."""

from dataclasses import replace

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import vbrt
from tests.models import config, gpt2, llama, mlp, wrap
from vbrt.config import Machine, load_config
from vbrt.errors import ConfigError, NoRoomError, WrapError


def plan_of(model, format="dense", **weights):
    return vbrt.make_plan(model, load_config(config(format, **weights)))


def reason(model, name, format="dense", **weights):
    return plan_of(model, format, **weights).skipped[name].reason


def bytes_of(model):
    """Once per storage."""
    return sum({p.untyped_storage().data_ptr(): p.numel() * p.element_size() for p in model.parameters()}.values())


def bert():
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    )


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    )


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), 2)


def tied(*, transposed=False, width=64):
    first, second = nn.Linear(width, 64, bias=False), nn.Linear(64, width, bias=False)
    second.weight = nn.Parameter(first.weight.t()) if transposed else first.weight
    return nn.Sequential(first, second).eval()


ARCHITECTURES = {
    "llama": llama,
    "llama tied": lambda: llama(tied=True),
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "mixtral": mixtral,
    "encoder": encoder,
    "mlp": mlp,
    "tied": tied,
    "bare": lambda: nn.Linear(64, 64),
    "no linear": lambda: nn.Conv2d(3, 8, 3),
    "empty": nn.Identity,
}


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_head", [True, False])
@pytest.mark.parametrize("format", ["dense", "nvfp4"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_swapped_and_skipped_bytes_add_up_to_the_parameters(name, format, keep_head):
    model = ARCHITECTURES[name]().eval()
    plan = plan_of(model, format, keep_head=keep_head)
    swapped, skipped = sum(s.dense_bytes for s in plan.swaps), sum(s.nbytes for s in plan.skipped.values())
    assert swapped + skipped == plan.dense_bytes == bytes_of(model)
    assert (plan.swapped_bytes, plan.kept_bytes) == (swapped, skipped)


@pytest.mark.parametrize("format", ["dense", "nvfp4", "mxfp4", "nf4", "quantile"])
def test_planned_pages_are_the_pages_that_are_made(format):
    vb = wrap(llama(), format, keep_head=False).materialize()
    made = {key: page.nbytes for key, page in vb.stack.pages.items()}
    assert made == {page.key: page.nbytes for swap in vb.plan.swaps for page in swap.pages}
    assert vb.stats().tiers["cpu"].held_bytes == vb.plan.home_bytes("cpu") == vb.plan.page_bytes


def test_a_plan_takes_what_wrap_takes():
    assert vbrt.make_plan(mlp(), "dense").swaps == vbrt.make_plan(mlp(), load_config("dense")).swaps
    with pytest.raises(ConfigError, match='did you mean "exact"'):
        vbrt.make_plan(mlp(), "exat")


def test_the_plan_of_a_fine_plane_is_an_upper_estimate():
    vb = wrap(llama(dtype=torch.bfloat16), "exact").materialize()
    planned = {page.key: page.nbytes for swap in vb.plan.swaps for page in swap.pages}
    assert all(page.nbytes <= planned[key] for key, page in vb.stack.pages.items())


def test_a_plan_needs_no_weights_and_equals_that_of_the_real_model():
    with torch.device("meta"):
        empty = llama()
    for format in ("dense", "nvfp4"):
        real = plan_of(llama(), format)
        assert plan_of(empty, format).swaps == real.swaps and plan_of(empty, format).skipped == real.skipped


def test_planning_changes_nothing():
    model = llama()
    before = {name: (id(p), p.data_ptr(), p._version) for name, p in model.named_parameters()}
    plan_of(model, "nvfp4")
    assert {name: (id(p), p.data_ptr(), p._version) for name, p in model.named_parameters()} == before


# -- reasons -----------------------------------------------------------------------------------------------------------


def test_the_output_head_stays_by_default_and_says_how_to_swap_it():
    assert "keep_head = false" in reason(llama(), "lm_head")
    assert "lm_head" in {swap.name for swap in plan_of(llama(), keep_head=False).swaps}


@pytest.mark.parametrize("keep_head", [True, False])
def test_a_head_that_is_tied_to_the_embedding_stays_because_of_it(keep_head):
    plan = plan_of(llama(tied=True), keep_head=keep_head)
    assert plan.skipped["lm_head"].reason == "shares storage with model.embed_tokens.weight, which stays dense"
    assert plan.skipped["lm_head"].nbytes == 0  # its bytes are the embedding's
    assert plan.skipped["model.embed_tokens"].nbytes == 128 * 64 * 4
    assert "lookup table" in plan.skipped["model.embed_tokens"].reason


def test_shared_bytes_are_counted_where_they_stay_whatever_the_order():
    model = nn.ModuleDict({"head": nn.Linear(64, 128, bias=False), "embed": nn.Embedding(128, 64)})
    model["head"].weight = model["embed"].weight
    skipped = plan_of(model).skipped
    assert {name: skip.nbytes for name, skip in skipped.items()} == {"head": 0, "embed": 128 * 64 * 4}


def test_routed_experts_are_listed_with_their_bytes():
    swap = next(swap for swap in plan_of(mixtral()).swaps if swap.name == "model.layers.0.mlp.experts")
    assert swap.dense_bytes == 4 * 3 * 64 * 96 * 4
    assert (swap.experts, swap.top_k, [site.shape for site in swap.sites]) == (4, 2, [(192, 64), (64, 96)])


def test_stacked_matrices_of_an_unknown_class_stay_with_the_reason():
    class Bank(nn.Module):
        def __init__(self):
            super().__init__()
            self.bank = nn.Parameter(torch.zeros(4, 32, 64))

    skip = plan_of(nn.Sequential(nn.Linear(64, 64), Bank())).skipped["1"]
    assert skip.nbytes == 4 * 32 * 64 * 4
    assert "3-D parameters (bank)" in skip.reason and "routed experts" in skip.reason


def test_attention_projections_that_are_read_and_never_called_are_refused():
    plan = plan_of(encoder())
    assert "reads its projections (in_proj_weight, in_proj_bias)" in plan.skipped["layers.0.self_attn"].reason
    assert "nn.MultiheadAttention" in plan.skipped["layers.0.self_attn.out_proj"].reason
    assert [swap.name for swap in plan.swaps] == [f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]


class Router(nn.Linear):
    """A subclass with semantics of its own."""

    def forward(self, x):
        return super().forward(x).softmax(-1), None


def replaced_forward(layer):
    layer.forward = lambda x: x
    return layer


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Initializing zero-element")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (nn.utils.spectral_norm, "recomputed from weight_orig by a hook"),
        (nn.utils.weight_norm, "recomputed from weight_g by a hook"),
        (lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", 0.5), "recomputed from weight_orig by a hook"),
        (nn.utils.parametrizations.spectral_norm, "parametrization"),
        (nn.utils.parametrizations.weight_norm, "parametrization"),
        (lambda layer: Router(64, 64), "Router: a subclass of nn.Linear"),
        (lambda layer: nn.LazyLinear(64), "LazyLinear before its first call: run the model once"),
        (lambda layer: nn.Conv1d(64, 64, 3), "Conv1d: not an nn.Linear"),
        (replaced_forward, "its forward was replaced on the instance"),
        (lambda layer: nn.Linear(64, 64, dtype=torch.complex64), "its weight is complex64"),
        (lambda layer: layer.to(torch.float8_e5m2), "its weight is float8_e5m2"),
        (lambda layer: nn.Linear(64, 0), "its weight has shape"),
    ],
)
@pytest.mark.parametrize("format", ["dense", "nvfp4"])
def test_what_is_not_a_plain_linear_is_refused_with_a_reason(change, says, format):
    model = nn.Sequential(nn.Linear(64, 64), change(nn.Linear(64, 64))).eval()
    plan = plan_of(model, format)
    assert says in plan.skipped["1"].reason
    assert [swap.name for swap in plan.swaps] == ["0"] and isinstance(plan.dense_bytes, int)
    vbrt.wrap(model, config(format)).materialize()


def test_layers_whose_class_has_a_forward_of_somebody_elses_stay(monkeypatch):
    """As tracing and quantization tools put it there, for all layers of a class."""

    def traced(self, x):
        return 2 * x

    model = nn.Sequential(nn.Linear(64, 64), nn.Embedding(64, 64))
    monkeypatch.setattr(nn.Linear, "forward", traced)
    assert "Linear.forward was replaced by " in reason(model, "0")
    monkeypatch.undo()
    assert [swap.name for swap in plan_of(model).swaps] == ["0"]


def test_a_weight_of_integers_is_refused():
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
    assert "its weight is int8" in reason(model, "0")


@pytest.mark.parametrize(("format", "swapped"), [("dense", True), ("exact", True), ("nvfp4", False)])
def test_double_weights_are_held_only_where_that_is_exact(format, swapped):
    plan = plan_of(nn.Linear(64, 64).double(), format)
    assert [swap.format for swap in plan.swaps] == (["dense"] if swapped else [])


def test_a_parameter_subclass_is_left_alone():
    class Packed(nn.Parameter):
        pass

    model = nn.Sequential(nn.Linear(64, 64))
    model[0].weight = Packed(torch.zeros(64, 64))
    assert reason(model, "0") == "its weight is a Packed, not a plain Parameter"


def test_adapters_that_train_beside_frozen_layers_are_left_alone():
    model = mlp().requires_grad_(False)
    model[4].requires_grad_(True)
    plan = plan_of(model, "nvfp4")
    assert "trains (requires_grad) while other layers are frozen" in plan.skipped["4"].reason
    assert len(plan.swaps) == 5
    assert len(plan_of(model.requires_grad_(True), "nvfp4").swaps) == 6


def test_include_exclude_and_min_parameters_are_named():
    model = mlp()
    assert reason(model, "2", exclude=["2", "4"]) == "weights.exclude has '2'"
    assert reason(model, "2", include=["0"]) == "not in weights.include = ['0']"
    assert reason(model, "2", min_parameters=5000) == "4096 parameters; weights.min_parameters = 5000"
    assert [swap.name for swap in plan_of(model, include=["*0"]).swaps] == ["0", "10"]


def test_padding_is_noted():
    assert plan_of(nn.Linear(2730, 8), "nvfp4").swaps[0].note == "in_features 2730 padded to a multiple of 16"


def test_fp32_under_exact_is_held_dense_and_the_plan_says_so():
    plan = plan_of(mlp(), "exact")
    assert {(swap.format, swap.fine) for swap in plan.swaps} == {("dense", "none")}
    assert "float32 has no fine plane" in plan.notes[0]


@pytest.mark.parametrize(
    ("model", "weights", "says"),
    [
        (
            mlp,
            {"exclude": ["0", "2"], "include": ["0", "2"]},
            "4 of 6 linear layers stay because: not in weights.include",
        ),
        (lambda: nn.Sequential(Router(64, 64), nn.ReLU()), {}, "1 of 1 linear layers stay because: Router: a subclass"),
        (lambda: nn.Sequential(nn.Conv1d(3, 3, 3), nn.Conv1d(3, 9, 3)), {}, "largest part is 1 (Conv1d: not an"),
        (nn.Identity, {}, "it has no parameters"),
    ],
)
def test_a_plan_that_swaps_nothing_says_so_with_the_most_frequent_reason(model, weights, says):
    (note,) = plan_of(model(), **weights).notes
    assert note.startswith("nothing is swapped") and says in note
    assert not plan_of(mlp()).notes


def test_patterns_that_no_module_matches_are_noted():
    notes = plan_of(mlp(), include=["0", "3.*"], exclude=["lm_haed", "2"]).notes
    assert notes[:2] == (
        "weights.include has '3.*', which no module matches",
        "weights.exclude has 'lm_haed', which no module matches",
    )


# -- ties --------------------------------------------------------------------------------------------------------------


def test_a_tie_between_linears_is_one_swap_with_aliases():
    (swap,) = plan_of(tied()).swaps
    assert (swap.name, swap.aliases, swap.dense_bytes) == ("0", ("1",), 64 * 64 * 4)


@pytest.mark.filterwarnings("ignore:vbrt.wrap. nothing is swapped")
@pytest.mark.parametrize("width", [64, 48])
def test_a_transposed_tie_is_refused_and_the_outputs_stay_right(width):
    model = tied(transposed=True, width=width)
    x = torch.randn(2, width)
    y = model(x)
    vb = wrap(model)
    assert vb.plan.swaps == () and bytes_of(model) == vb.plan.dense_bytes
    assert "1.weight in another layout" in vb.plan.skipped["0"].reason
    assert torch.equal(vb(x), y)


def test_one_refused_layer_of_a_tie_keeps_all_of_them():
    plan = plan_of(tied(), exclude=["1"])
    assert plan.swaps == () and plan.dense_bytes == 64 * 64 * 4
    assert plan.skipped["0"].reason == "shares storage with 1.weight, which stays dense"
    assert plan.skipped["1"].reason == "weights.exclude has '1'"


def test_a_weight_that_a_parent_holds_too_stays():
    model = mlp()
    model.register_parameter("shared", model[0].weight)
    assert "shares storage with (root).shared" in reason(model, "0")


@pytest.mark.parametrize("format", ["dense", "nvfp4"])
def test_a_layer_that_also_holds_the_weight_of_another_keeps_its_own(format):
    model, x = mlp(depth=3), torch.randn(2, 64)
    model[2].extra = model[0].weight
    y = model(x)
    vb = wrap(model, format)
    assert vb.plan.skipped["0"].reason == "shares storage with 2.extra, which stays dense"
    assert [(swap.name, swap.aliases) for swap in vb.plan.swaps] == [("2", ()), ("4", ())]
    assert torch.allclose(vb(x), y, atol=0 if format == "dense" else 0.5)
    model = vb.unwrap()
    assert model[2].extra is model[0].weight and not torch.equal(model[2].weight, model[0].weight)


def test_a_weight_that_lies_in_the_memory_of_a_buffer_or_of_a_larger_parameter_stays():
    model = mlp(depth=3)
    model.register_buffer("seen", model[0].weight.detach())
    model.both = nn.Parameter(torch.randn(128, 64))
    model[2].weight = nn.Parameter(model.both.detach()[64:])
    plan = plan_of(model)
    assert plan.skipped["0"].reason == "shares storage with (root).seen, which stays dense"
    assert plan.skipped["2"].reason.startswith("its memory overlaps that of (root).both")
    assert [swap.name for swap in plan.swaps] == ["4"]


def test_one_module_under_two_names_is_one_swap():
    shared = nn.Linear(64, 64)
    model = nn.Sequential(shared, nn.Tanh(), shared).eval()
    x = torch.randn(2, 64)
    y, nbytes = model(x), bytes_of(model)
    vb = wrap(model)
    assert list(vb.registry) == ["0"] and vb.plan.dense_bytes == nbytes
    assert torch.equal(vb(x), y) and vb.module[0] is vb.module[2]
    assert vb.unwrap()[2] is shared and type(shared) is nn.Linear


# -- refusals of the whole ---------------------------------------------------------------------------------------------


def test_a_wrapped_model_is_not_planned_again():
    vb = wrap(mlp())
    with pytest.raises(WrapError, match=r"0 is a VB layer already.*unwrap"):
        plan_of(vb.module)
    with pytest.raises(WrapError, match=r"\(root\) is a VB layer already"):
        plan_of(vb.module[0])


GPU = Machine(gpu_total_bytes=1 << 20, gpu_free_bytes=1 << 20, cpu_total_bytes=8 << 20, cpu_available_bytes=4 << 20)
NO_GPU = replace(GPU, gpu_total_bytes=None, gpu_free_bytes=None)
GiB = 1 << 30
GPU_24GB = Machine(
    gpu_total_bytes=24 * GiB, gpu_free_bytes=24 * GiB, cpu_total_bytes=64 * GiB, cpu_available_bytes=60 * GiB
)
CPU_64GB = replace(GPU_24GB, gpu_total_bytes=None, gpu_free_bytes=None)


def lookup(rows, device=None):
    """An embedding of 256 * `rows` bytes, a head of as many, and 64 KiB of layers to swap."""
    with torch.device(device or "cpu"):
        parts = {"embed": nn.Embedding(rows, 64), "body": mlp(depth=4), "lm_head": nn.Linear(64, rows, bias=False)}
        return nn.ModuleDict(parts)


def auto(gpu="auto"):
    return load_config({"weights": {"format": "dense", "min_parameters": 0}, "tiers": {"gpu": {"enabled": gpu}}})


@pytest.mark.parametrize(
    ("machine", "config", "tier", "free"),
    [(GPU, auto(), "gpu", "1.0 MiB"), (GPU, auto(gpu=False), "cpu", "4.0 MiB"), (NO_GPU, auto(), "cpu", "4.0 MiB")],
)
def test_what_is_kept_and_does_not_fit_is_named_instead_of_the_largest_layer(machine, config, tier, free):
    with pytest.raises(ConfigError) as caught:
        vbrt.make_plan(lookup(20000, "meta"), config, machine)
    says = str(caught.value)
    assert "kept parameters of 10241024 bytes (9.8 MiB), which are not swapped, do not fit" in says
    assert f"into the {tier} memory: {free} are free" in says and "largest layer" not in says
    assert "embed (4.9 MiB; Embedding: a lookup table" in says and "lm_head (4.9 MiB; output head" in says
    assert "weights.keep_head" in says and ("tiers.gpu.enabled = false" in says) == (tier == "gpu")


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_gpu_that_is_insisted_on_and_absent_is_refused(mode):
    for machine in (GPU, NO_GPU):
        for gpu in ("auto", False):
            planned = vbrt.make_plan(mlp(), load_config(auto(gpu), mode=mode), machine)
            assert planned.compute_tier == ("gpu" if gpu and machine is GPU else "cpu")
    with pytest.raises(ConfigError, match=r'tiers\.gpu\.enabled = true; this machine has no GPU.*"auto"'):
        vbrt.make_plan(mlp(), load_config(auto(gpu=True), mode=mode), NO_GPU)
    assert vbrt.make_plan(mlp(), load_config(auto(gpu=True), mode=mode), GPU).compute_tier == "gpu"


def test_a_budget_for_a_gpu_that_is_absent_is_noted():
    given = load_config(auto(), tiers={"gpu": {"budget": "6GiB"}})
    assert "tiers.gpu.budget = '6GiB' is for a GPU" in vbrt.make_plan(mlp(), given, NO_GPU).notes[0]
    assert not vbrt.make_plan(mlp(), auto(), NO_GPU).notes


def test_a_plan_notes_where_more_than_a_tenth_is_not_swapped_with_the_largest_part():
    plan = vbrt.make_plan(lookup(1000, "meta"), auto(), NO_GPU)
    (note,) = plan.notes
    assert not plan.warnings and note.startswith(
        "501.0 KiB of the model's 565.0 KiB are not swapped and stay in the cpu memory, outside"
    )
    why = "Embedding: a lookup table, read by rows; weights.embeddings = true swaps it"
    assert f"the largest part is embed (250.0 KiB; {why})" in note
    assert not vbrt.make_plan(mlp(), auto(), NO_GPU).notes
    assert len(vbrt.make_plan(lookup(1000, "meta"), load_config(auto(), mode="train"), NO_GPU).notes) == 1


def test_a_plan_warns_where_what_is_kept_does_not_fit_beside_a_budget():
    room = replace(NO_GPU, cpu_total_bytes=1 << 30, cpu_available_bytes=70_000)
    tight = load_config(auto(), tiers={"cpu": {"budget": "1MiB"}})
    (warning,) = vbrt.make_plan(lookup(20, "meta"), tight, room).warnings
    assert "do not fit beside its budget: 64.0 KiB of pages find" in warning and "outside the budgets" in warning
    assert not vbrt.make_plan(lookup(20, "meta"), tight, replace(room, cpu_available_bytes=90_000)).warnings


def test_auto_shares_out_what_the_kept_parameters_leave():
    for gpu in ("auto", True, False):
        plan = vbrt.make_plan(lookup(1000, "meta"), auto(gpu), GPU)
        free, percent = (1 << 20, 90) if gpu else (4 << 20, 80)
        assert plan.kept_bytes == 2 * 256_000 + 1024
        assert plan.budgets[plan.compute_tier] == (free - plan.kept_bytes) * percent // 100
        without = vbrt.make_plan(lookup(1000, "meta"), auto(gpu), GPU, charge_kept=False)
        assert without.budgets[plan.compute_tier] == free * percent // 100


def test_kept_parameters_that_are_in_memory_already_are_not_taken_off_again():
    plan = vbrt.make_plan(lookup(1000), auto(), NO_GPU)
    assert plan.budgets["cpu"] == ((4 << 20) + plan.swapped_bytes) * 80 // 100
    huge = lookup(20000)  # is there, so it fits
    assert vbrt.make_plan(huge, auto(), replace(NO_GPU, cpu_total_bytes=1 << 30)).kept_bytes == 10241024


def test_pages_without_room_beside_the_kept_parameters_name_both():
    given = load_config(auto(), weights={"embeddings": False})
    with pytest.raises(ConfigError, match=r"0#dense: 16384 bytes.*The gpu also holds kept parameters of .*embed \("):
        vbrt.make_plan(lookup(2040, "meta"), given, GPU)


@pytest.mark.parametrize("preset", ["dense", "fp4", "exact"])
def test_tables_that_do_not_fit_go_into_the_tiers_in_their_own_bits(preset):
    given = load_config(preset, weights={"min_parameters": 0})
    plan = vbrt.make_plan(lookup(3000, "meta"), given, GPU)
    table = next(swap for swap in plan.swaps if swap.name == "embed")
    assert (table.format, [page.home for page in table.pages]) == ("dense", ["cpu"])
    assert plan.warnings[-1] == plan.notes[-1]
    assert "lookup tables do not fit beside the rest, and are held in the tiers" in plan.notes[-1]
    assert "embed (750.0 KiB)" in plan.notes[-1] and "waits" not in plan.notes[-1]
    assert not any("in their own bits" in note for note in vbrt.make_plan(lookup(1000, "meta"), given, GPU).notes)
    asked = load_config(given, weights={"formats": {"embed": "nf4"}})
    assert next(s for s in vbrt.make_plan(lookup(3000, "meta"), asked, GPU).swaps if s.name == "embed").format == "nf4"
    with pytest.raises(ConfigError, match="do not fit"):
        vbrt.make_plan(
            lookup(3000, "meta"),
            load_config(given, weights={"embeddings": False}),
            replace(GPU, gpu_free_bytes=1 << 19),
        )


@pytest.mark.parametrize(
    ("rows", "tied", "changed", "machine", "held"),
    [
        (70000, False, {}, GPU_24GB, True),
        (70000, True, {}, GPU_24GB, False),  # the head's weight
        (60000, False, {}, GPU_24GB, False),  # less than 256 MiB
        (70000, False, {"weights": {"embeddings": False}}, GPU_24GB, False),
        (70000, False, {"tiers": {"cpu": {"enabled": False}}}, GPU_24GB, False),
        (70000, False, {"tiers": {"cpu": {"pinned": False}}}, GPU_24GB, False),  # no kernel reads it there
        (70000, False, {}, CPU_64GB, False),  # a CPU reads a parameter's rows as well
    ],
)
def test_a_table_that_is_a_large_part_of_a_model_goes_into_the_tiers(rows, tied, changed, machine, held):
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(rows, 1024), nn.Linear(1024, 1024), nn.Linear(1024, rows, bias=False))
    if tied:
        model[2].weight = model[0].weight
    plan = vbrt.make_plan(model, load_config("fp4", **changed), machine)
    assert any(swap.by_rows and swap.format == "dense" for swap in plan.swaps) == held
    assert any("take a tenth of the model or more" in note for note in plan.notes) == held and not plan.warnings


def test_a_table_that_a_head_shares_stays_beside_large_ones_where_it_fits():
    """Each pass reads all of it, as the head; the other table's rows are few."""
    with torch.device("meta"):
        tables = nn.ModuleDict({"word": nn.Embedding(30000, 1024), "by_layer": nn.Embedding(30000, 4096)})
        model = nn.ModuleList([tables, nn.Linear(1024, 1024), nn.Linear(1024, 30000, bias=False)])
    model[2].weight = tables["word"].weight
    plan = vbrt.make_plan(model, load_config("fp4"), GPU_24GB)
    assert [swap.name for swap in plan.swaps if swap.by_rows] == ["0.by_layer"]
    assert "another layer reads whole; weights.embeddings = true swaps both" in plan.skipped["0.word"].reason
    with pytest.raises(NoRoomError, match=r"0\.word \(117\.2 MiB; Embedding: a lookup table, read by rows"):
        vbrt.make_plan(model, load_config("fp4"), replace(GPU_24GB, gpu_free_bytes=64 << 20))


def test_a_model_whose_table_does_not_fit_runs_from_its_files(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=20000, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    room = replace(NO_GPU, cpu_total_bytes=64 << 20, cpu_available_bytes=9 << 20, ssd_free_bytes=1 << 30)
    monkeypatch.setattr("vbrt.model.planner.this_machine", lambda config: room)
    tiers = {"ssd": {"enabled": True, "path": str(tmp_path / "pages")}}
    with pytest.warns(UserWarning, match="lookup tables do not fit beside the rest"):
        vb = vbrt.from_pretrained(tmp_path / "model", "dense", tiers=tiers)
    ids = torch.tensor([[5, 19999, 7]])
    with torch.no_grad():
        assert torch.equal(vb(ids).logits, model(ids).logits)
    assert vb.stats().layers["model.embed_tokens"].home == "ssd"
    vb.close()


def test_a_budget_below_the_largest_layer_names_key_and_layer(tmp_path):
    settings = {
        **config("dense"),
        "tiers": {"gpu": {"enabled": False}, "cpu": {"budget": 4096}, "ssd": {"enabled": True, "path": str(tmp_path)}},
    }
    with pytest.raises(ConfigError, match=r"tiers\.cpu\.budget = 4096 bytes is smaller.*0#dense"):
        vbrt.wrap(mlp(), settings)
    model = mlp()
    with pytest.raises(ConfigError, match="the pages take"):
        vbrt.wrap(model, {**config("dense"), "tiers": {"gpu": {"enabled": False}, "cpu": {"budget": 20000}}})
    assert type(model[0]) is nn.Linear and not any(tmp_path.iterdir())
