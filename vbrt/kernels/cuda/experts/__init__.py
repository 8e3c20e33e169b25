"""Routed experts on a GPU: kernels that read each expert's weights from its own page, in tile order or in rows.

Token ids, routing weights and a table of page addresses enter. `expert_kernels.py` picks a way from what the host
knows: pairs (token, expert), experts, dtype, GPU, page order. Up to 20 pairs an expert on average it is `few_tokens`;
beyond that `many_tokens`. The most pairs are for `decoded_experts` on sm_100 (decoded weights and torch's grouped
matmul, at most 1 GiB of scratch): elsewhere torch would read the number of an expert's pairs back to the host.

**Few tokens**: the loop of `kernels/cuda/e2m1/narrow_gluon.py`, weights from the expert's page straight to registers.
The compiler must be told that pages begin at 16 bytes, because their addresses are numbers from a table. Gates and
values are two row tiles of one program, or neighbouring rows where they are interleaved, so bias, activation and
product need no other launch. Where tokens hardly share experts each pair is a program's own, nothing is sorted, and the
sum over a token's experts is one launch. Otherwise pairs are sorted on the device (`pairs.py`); only the device knows
how many blocks there are, so the grid has room for the most, and programs without a block end after one read.

**Many tokens** (`grouped_gluon.py`): the persistent kernel with one dimension more; pairs are sorted by expert once a
layer. Weights are read two pairs of columns ahead, across the ends of items. Weighted rows are added in fp32, in the
order of the ids. Roads not taken: 256 pairs at a time were slower in four cases of five; a tile order that needs no
gather would exchange words between lanes in every tile; programs that go on to the next rows of their expert were
slower in nearly all cases.

Without `warpgroup_mma` (`grouped_mma_gluon.py`) it is the tile loop of `kernels/cuda/e2m1/mma_gluon.py`, whose copies
take any rows: nothing is gathered before.

**Rows of codes** (`row_experts.py`), of all formats but those of tiles: the loops of `kernels/cuda/table` and
`kernels/cuda/plain` by addresses, a pair on its own or the pairs of an expert together. From 48 pairs an expert on, in
bf16, matrices are decoded to scratch memory for torch's grouped matmul (`decoded_experts.py`). Gates that a kernel does
not fuse are one launch (`gated_rows.py`).

**Residency on the device** (`residency.py`, `resolve_triton.py`, `fetch_triton.py`): int64 tables, for each page its
slot, score, time and counts; for each slot its page and place in the window's queue; for each pool a clock. A lease is
two launches: one program marks the routed experts, applies the rule of `vbrt.residency.expert_pool` and writes the
address of each leased expert and a list of what is missing; 264 programs then copy the list, 16 bytes a thread. Nothing
waits for the host, so a decode step may be one CUDA graph. The road not taken: one launch in which programs wait for
the first one would save about 1 µs. Pages on a drive (`drive_mail.py`, `drive_triton.py`) take a launch more: a post of
their numbers; the programs that copy then wait for addresses.
"""

__all__: list[str] = []
