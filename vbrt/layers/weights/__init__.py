"""One weight in the tiers: its state, its planes, the kernels that multiply with it, and the temporary that `.weight`
gives.

A dense parameter or planes from a file enter; `product(x, bias)` leaves. `state.py` is the state machine: a `Weight` is
dense, streamed, hosted, resident, by rows or lent, transitions only there; it is shared by all layers that are tied to
it. `products.py` has one product object a state, chosen at the transition, and `hosted_weights.py` that of a weight
which the CPU computes with, where its page lies; `linear_product.py` says which computation runs, and
`kernel_selection.py` which kernel: plans size pages by the same choice. Products see a weight through the protocol of
`encoded_weight.py`.

**Unencoded weights ("shells")**. From `wrap` on the parameter is held by the `Weight` (`dense`), so nothing that walks
parameters finds it. On the first forward, or at `materialize()`, it is encoded, planes are packed into pages, pages go
to their home, and the parameter is dropped. Weights that other code reads without calling the module (Mamba's
`dt_proj`, WavLM's projections, the head of a fused loss) are encoded by the first pass that reads them, at the read or
as the pass ends. The road not taken: a frozen nn.Parameter in the module until the first forward. Whatever walks
through parameters took it (an optimizer keeps it alive, an average of weights pairs it with another, DDP waits for its
gradient), and `requires_grad_(True)` on it said nothing to a layer whose weight had trained before.

**The temporary** (`weight_view.py`, `vbrt.kernels.decoded_weight`). All layers on a weight give the same object while
it lives; what is written into it, or into a view or numpy array of it, makes the layers dense with these values,
encoded by the next forward. While one is held the layer takes no way without a lease. Of a dense weight it lies in the
parameter's memory, so nothing is copied to read it. After encoding it keeps this memory where the values are the same,
and has its own where they were rounded: others may hold the parameter. A parameter that was taken before `wrap` is the
layer's only until the first forward. `state_dict()` holds copies, of dense weights views, except under
`keep_vars=True`. `model.parameters()` lists of VB layers the bias only, so `num_parameters()` and
`get_memory_footprint()` count no weight in the tiers; `vb.plan.dense_bytes` and `vb.stats()` know the whole. Tools that
look into `module._parameters` for the old weight, such as accelerate's `set_module_tensor_to_device`, fail: use
`load_state_dict`.

**Precision.** `precision("coarse")` makes this thread's forwards lease the coarse planes of `exact` weights only. The
result is bit for bit that of the 4-bit weight by the same kernel. Layers without a fine plane have one precision, and
`stats().fallbacks` says so once. The backward pass takes its forward's. A compiled graph follows each call and refuses
coarse gradients; a traced graph refuses coarse passes; a CUDA graph replays what it captured.

**Compiled graphs** see planes that never move as tensors in the layer's own dict (`graph_planes.py`) and the kernel's
operator on them, so that CUDA graphs can capture it; for planes that move, and for gradients, one opaque operator that
names the weight by a token and leases when it runs (`weight_operators.py`). Guards are host time that no GPU hides at
one token: that a module's dict has not changed dynamo sees at once, what lies behind another object it would go through
one by one. So a layer keeps one tensor and one string there; when planes begin to move or are replaced, both are taken
out and the graph is compiled anew. Graphs name a layer by a random number of its process; they hold no weights. A
weight that `functional_call` puts in is refused in compiled functions: graphs would have to guard the parameter, and be
compiled again whenever a layer is encoded.

**Small batches on a CPU** (`small_batch.py`). Layers that get one tensor one after the other (queries, keys, values;
gate, up) are computed by the first of them in one call. A result that was computed ahead is given out for an input with
the same bits only, so nothing that happens to the input in between can make it wrong, where a comparison by identity
and version could (`x.data`, inference tensors).

**Parts of weights** (`weight_shards.py`). A parallel plan makes DTensors of a model's weights. Planner and layers see
this rank's part, a plain local parameter, so kernels see local shapes; `state_dict` and `unwrap()` give DTensors again.
Parts decode to the parts of what one GPU decodes: before a part is encoded its largest magnitude is reduced over the
group, which decides the tensor scale, and a fitted codebook is fitted to the gathered weight, one at a time. (Routed
experts in `quantile` differ: ranks that cut experts fit each one's.) The road not taken is a DTensor subclass of
planes: dispatching it costs more than a kernel at batch 1.
"""

__all__: list[str] = []
