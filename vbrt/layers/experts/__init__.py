"""Routed experts: modules that keep the matrices of many experts as a few parameters, in the tiers, a page for each
expert.

A module sends each token to k experts; a *pair* is a token and one of its experts. Tokens, ids and routing weights
enter the forward. `experts_layer.py` is a mixin in front of the module's own class, made for each plain class when
first needed: attributes such as `_apply_gate`, `act_fn` and `num_experts` stay what they are, and the plain forward
stays available. One swap of the plan, named after the module; the parts of an expert, "up" and "down", lie side by side
in its page. Matrices are encoded as [N, K] where the module keeps them transposed, too. Biases, norms and routers stay
parameters.

| file | job |
| --- | --- |
| `run_experts.py` | which computation runs: its head is the table |
| `library_product.py`, `library_experts.py` | lossless: the implementation that the config names, on leased experts |
| `expert_stack.py`, `sequential.py`, `unread_stack.py` | how these see leased experts, not one tensor of all |
| `kernels_product.py`, `gates.py`, `special_calls.py` | 4 and 8 bits: ops on pages; gates; special classes |
| `gathered_experts.py`, `exact_places.py` | lossless experts, gathered by the device; where it finds two planes |
| `experts_handle.py`, `leased_experts.py`, `expert_pages_io.py` | the weights: pages, leases, pickles |
| `experts_coder.py`, `expert_encoding.py` | encoding and decoding, and which kernels |
| `device_cache.py`, `residency_owner.py`, `residency_reasons.py` | residency decided by the GPU; who decides, why |
| `prompt_ring.py`, `drive_pages.py` | pages that pass by the cache; pages that the GPU asks for, on a drive |
| `hosted_experts.py`, `miss_rates.py` | missed experts computed by the CPU, where the GPU decides |
| `missed_experts.py`, `cpu_experts.py`, `captured_cpu.py` | the same where the host decides; experts on a CPU |
| `expert_gradients.py`, `expert_operators.py` | gradients of frozen experts; operators of compiled graphs |

**Same numbers.** Lossless experts compute by the function that `config._experts_implementation` names, on a view of the
module that has the leased experts only and ids that count within them. Where not all touched experts are leased at
once, the rows of pairs are kept, and weighed and summed at the end as that function does it; "grouped_mm" gets its rows
in the order of its own sort, "batched_mm" no batch of one, "eager" its experts in their turn. So neither the budget nor
the tier changes a bit, and tests compare with the plain module in every implementation. 4-bit experts compute by the
ops `experts_up` and `experts_down` (`vbrt.kernels.experts` specifies them), no matter who decides what is resident.

**A scan or a cache.** Where at least as many ids are routed as there are experts, nearly all are touched: the pass
takes them in order, in chunks, and announces them, so that pages are prefetched and the policy does not take the scan
for a habit. With fewer ids one lease takes the touched experts.

**The GPU decides** where pages live in page-locked memory, or on a drive below it, and the policy is `experts`. Once
all experts are encoded `vbrt.model.expert_cache` makes one `DeviceCache` for the model: its slots lie in a few pages of
the computing tier, reserved at once from its budget. Leases follow each other; replays of a graph must run on the same
stream, or be ordered. Scans take half of the slots at most. A lower budget takes the last pages away, and one up to the
first budget brings them back, below graphs that go on; any other, and new weights, end the cache, and the next forward
makes another. Everything else (implementations that loop over experts, a CPU) goes the host's way with the same
bits; so do gradients, and lossless experts that were cast or given another implementation since. `stats()` says who
decides and why.

**Pages on a drive** (`drive_pages.py`, `tiers/stack/staged_pages.py`, `residency/host_slots.py`). The device's table
has an address for each page in host memory, and a number below 0 for the others. A lease posts what it is missing of
these and waits; a thread reads them into slots of host memory, and writes their addresses. In a capture this is one
launch more: a post, then the fetch, which copies pages in host memory before it waits. Which pages have addresses
changes between passes only, so no read of the device meets a slot that is being written. Roads not taken: layers with
pages on a drive decided by the host, the others by the device: one such layer takes a whole step out of its recording,
and with host memory for three quarters of the pages it would still be every fourth layer that waits for its routing.
Addresses that change while passes run: each eviction would have to wait for the device.

**Lossless experts in the cache** are computed by the implementation, on weights that are copied together from the
slots, or merged from the two planes that a slot has of `exact` ones, 256 MiB at a time at most, outside of the budgets.
Where one such copy takes a page for each pair: the implementation itself (`gathered`; "batched_mm" without biases reads
dense slots where they lie). Where a lease takes all pairs and a copy does
not: rows by copies, of shapes that only the number of pairs decides (`unheard`). A scan: the host hears once how many
pairs each expert has (`Heard`). The first two may be captured. Addresses of experts that no lease has taken are those
of any slot, so what is left over of a copy reads memory that is there. What the cache has is not fetched in a scan.

**Captured steps.** Experts whose pages all live on the GPU or whose residency the GPU decides are captured. Steps stay
eager for pages that the host leases, and where so many sequences scan lossless experts (as many pairs as experts, or
more than the cache has slots); `stats().steps` names a layer. `heard_by_host`
(`vbrt.estimation.memory.expert_workspace`) says so of a plan.

**Missed experts that the CPU computes** (`experts.miss`). A pass on the host's path copies x and the ids to the host
with one wait, and divides the experts that are not in the top tier (`vbrt.residency.miss_policy`). A `LowerLease` holds
their pages where they lie; it is decided before the lease of the others. Rows of both sides are added before they are
weighed: each has one summand that is not zero, so the sum has the order of the ids. What `"auto"` goes by is measured
through the same calls (`miss_rates.py`): seconds by expert and seconds by call apart, since a layer misses two experts
or ten. One large expert that misses alone is not shared. A job that is not fetched within 20 ms is ended by a thread of
the team: a pass that waits for room on top may hold pages that another thread is waiting for. On an H200's host, 48
layers of Qwen3-30B-A3B's shape with a tenth of the experts on the GPU (`scripts/experts_decode.py --breakdown`): 4.3 ms
a layer, of which a job of the team takes 0.35, leasing and launching what the GPU computes 1.4, and Python's operators
of the rest 2.4, where fetching replays a graph. Road not taken: a second page order for CPUs, which the GPU puts into
tiles on arrival: the kernel that reads tiles left 15 % to gain.

**Hosted experts**: the same where the GPU decides (`hosted_experts.py`). A lease leaves a share of its misses to the
host, by a table in the device's memory (`kernels/cuda/experts/resolve_triton.py`): those of least worth, as frequent
ones shall stay. Their ids and weights are posted before the others are fetched, and a wait behind the layer's kernels
adds the host's sum, so that both sides overlap, in captured graphs, too. A post that names no expert is counted by the
host, not answered, and not waited for. Host functions in a graph would take 28 us each, a post and its wait 5.

**Gradients of frozen experts.** The forward keeps ids, hidden states and routing weights, and nothing of the weights'
size. The backward pass leases the touched experts again, in chunks, and computes each chunk once more by the
implementation that the config names, under the forward's autocast and precision. Matrices may be views of leased pages,
so the derivative is taken within the lease; where it is to be derived again, they are copied.

**Recorded training.** Where checkpointed blocks are recorded (`vbrt/model/recorded_blocks.py`), a pass leases all
experts of a layer at once (`run_experts.leasing_all`): shapes and addresses do not depend on the routing, and experts
without tokens have no rows. Gradients are then summed over all experts at once, not chunk by chunk, as where a budget
cuts the lease. The backward of such a block follows the forward that is computed again at once, and takes that one's
decoded weights, where an eager one decodes a third time.

**Encoding**: 16 MiB of dense weights at a time on a CPU, 128 on a GPU, where the next ones are copied on the tier's
copy stream meanwhile.
"""

from vbrt.layers.experts import expert_operators as expert_operators  # registers them
from vbrt.layers.experts.experts_handle import ExpertsHandle
from vbrt.layers.experts.experts_layer import VBExperts
from vbrt.layers.experts.experts_spec import ExpertsSpec
from vbrt.layers.experts.gates import gate_of
from vbrt.layers.experts.residency_reasons import why_not_recorded, why_waits
from vbrt.layers.experts.run_experts import leasing_all
from vbrt.layers.experts.special_calls import (
    VBGivenExperts,
    VBParallelExperts,
    VBSharedExperts,
    VBSortedExperts,
    VBZeroExperts,
)

__all__ = [
    "ExpertsHandle",
    "ExpertsSpec",
    "VBExperts",
    "VBGivenExperts",
    "VBParallelExperts",
    "VBSharedExperts",
    "VBSortedExperts",
    "VBZeroExperts",
    "gate_of",
    "leasing_all",
    "why_not_recorded",
    "why_waits",
]
