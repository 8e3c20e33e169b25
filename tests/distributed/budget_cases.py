"""What memory ranks take for "auto", and how fast they are together, as ranks are asked for it."""

import json
import os
from typing import Any
from unittest import mock

import torch.distributed as dist

import vbrt
from tests.distributed.cases import llama
from tests.models import config
from vbrt.config import Machine, load_config
from vbrt.estimation.advice import multi_gpu_rates
from vbrt.estimation.advice.multi_gpu_rates import GroupRates
from vbrt.model import colocated_ranks
from vbrt.model.machine_memory import this_machine

GIB = 2**30
MEMORY = mock.Mock(total=64 * GIB, available=40 * GIB)


def machine(*, places: list[tuple[str, str]] | None = None, late: int | None = None) -> Machine | None:
    """What a rank finds; where torchrun says nothing, by where ranks run, or by where those that answer do."""
    rank, place = dist.get_rank(), colocated_ranks._place()
    colocated_ranks._told.cache_clear()
    with mock.patch("psutil.virtual_memory", return_value=MEMORY), mock.patch.dict(os.environ):
        if places is not None or late is not None:
            del os.environ["LOCAL_WORLD_SIZE"]
        if late is not None:
            store = dist.distributed_c10d._get_default_store()
            if rank == late:  # as if it had not said it in an earlier test
                store.delete_key(f"vbrt/places/{rank}")
            else:  # the others have, and nobody waits for them
                store.set(f"vbrt/places/{rank}", json.dumps(place))
            dist.barrier()
            if rank == late:
                return None
        with (
            mock.patch.object(colocated_ranks, "_place", return_value=place if places is None else places[rank]),
            mock.patch.object(colocated_ranks, "ANSWER_S", 0.2 if late is not None else 5.0),
        ):
            return this_machine(load_config("fp4"))


def planned() -> dict[str, Any]:
    """The plan of a model with "auto" and another with a percentage, and a budget set again."""
    with mock.patch("psutil.virtual_memory", return_value=MEMORY):
        share = vbrt.make_plan(llama(), load_config(config("dense"), tiers={"cpu": {"budget": "10%"}}))
        vb = vbrt.wrap(llama(), load_config(config("dense"), tiers={"cpu": {"budget": "auto"}})).materialize()
        held = vb.stats().tiers["cpu"].held_bytes
        again = vb.set_budget("cpu", "auto")
        found = {"auto": vb.plan.budgets["cpu"], "notes": vb.plan.notes, "held": held, "again": again}
        vb.close()
    return found | {"share": share.budgets["cpu"], "share_notes": share.notes}


def measured(cache: str) -> tuple[GroupRates, GroupRates | None, GroupRates | None]:
    """Rates of these ranks by small tensors, and what is kept for two and for three."""
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=cache), mock.patch.object(multi_gpu_rates, "_LARGE", 1 << 18):
        found = multi_gpu_rates.measure_group_rates()
        dist.barrier()
        return found, multi_gpu_rates.kept_group_rates(2), multi_gpu_rates.kept_group_rates(3)
