"""What experts counted during a recording."""

from vbrt.report.expert_counters import ExpertCounts
from vbrt.report.expert_heat import LayerHeat, heat_between
from vbrt.report.timeline import COMPUTE, Span
from vbrt.tiers.stack.event_recorder import page_names


def test_a_recording_counts_what_came_since_it_began():
    before = ExpertCounts((5, 0), (1, 1), (0, 0), (0, 0), 9)
    after = ExpertCounts((8, 0), (1, 4), (0, 0), (0, 0), 12)
    assert heat_between("a", before, after) == LayerHeat("a", (3, 0), (0, 3))
    assert heat_between("a", before, after).touches == (3, 3)
    anew = ExpertCounts((2, 0), (0, 1), (0, 0), (0, 0), 1)  # the layer was given other weights meanwhile
    assert heat_between("a", before, anew) == LayerHeat("a", (2, 0), (0, 1))


def test_a_lease_of_several_experts_is_named_by_their_numbers():
    layer = "model.layers.0.mlp.experts"
    keys = [f"{layer}#coarse.3", f"{layer}#fine.3", f"{layer}#coarse.17", "model.layers.0.q_proj#coarse"]
    assert page_names(keys) == f"{layer}#coarse.3,17 + {layer}#fine.3 + model.layers.0.q_proj#coarse"
    assert Span(COMPUTE, page_names(keys), 0, 1).layer == layer
    scan = [f"{layer}#coarse.{e}" for e in (*range(5, 100), 101, 103, 104)]
    assert page_names(scan) == f"{layer}#coarse.5-99,101,103-104" and page_names(()) == ""
