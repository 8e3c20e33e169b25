"""VB layers: the modules that take the place of nn.Linear, nn.Embedding, Conv1D and their subclasses.

`held.py` has nn.Module's protocol once (`state_dict`, `load_state_dict`, `.to()`, assignment, pickling), over `held():
name -> weight`; `vb_layer.py` adds what a layer of one weight needs, and a kind's class its forward. `layer_kinds.py`
is an allow-list of exact classes, one record each. A subclass of nn.Linear is swapped only if it has a record:
`FalconLinear` rounds before it adds the bias, and so does its VB layer. Pruning, norms and parametrizations that
replace the weight are refused by the layer's name, which stays as it was. `requires_grad_(True)` on the weight, the
layer or a module around it makes plain, dense layers of what it reaches, outside of all budgets, with a warning
(`unfreeze.py`).

**Embeddings** (`embedding.py`, `weights.embeddings = true`). Most of a table is never read in a pass, so it does not
move. A forward takes the rows of its tokens where the pages live: on the GPU; in page-locked host memory, which kernels
read in place; in other host memory or a page file, from which the rows are copied (the host waits for the indices).
Pages that only lookups read are `by_rows`: no policy hears of them, they need no room above their home, and a table may
be larger than those tiers. Reads of the whole table (`.weight`, state_dict, save, unwrap) get a copy outside the
budgets. A table that a head is tied to has one set of pages, and the head goes with it although `keep_head` is true:
rows are read at home, the head leases. In a kernel's order an entry holds 16 rows, which are decoded together. Weights
decoded for a row of K: dense and 4 bits K, tiles 16 K. The fine plane's lists have an index every 4096 weights, so
codes are read from the beginning of the row's span: none more where K is a multiple of 4096, K more for 2048, 6 K for
768. To graphs a lookup is one operator, `vbrt::rows`, which is cut out of CUDA graphs that torch.compile makes.
max_norm, subclasses without a record and `mode = "train"` keep a table dense. A subclass with a record computes with
the rows (`derived_embedding.py`). Lookups are not drawn in timelines.

**`weight.dtype`** and other facts are answered without decoding the weight (`weight_facts.py`).

**DTensors** (`sharded_linear.py`): lossless weights are multiplied by DTensor's own rules, others by kernels whose
result is then declared a shard or a partial sum.
"""

__all__: list[str] = []
