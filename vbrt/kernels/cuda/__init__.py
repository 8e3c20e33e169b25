"""Kernels for GPUs, in Triton and Gluon, by family of number formats, and what launches them.

| family | formats |
| --- | --- |
| `e2m1` | nvfp4, mxfp4 in tile order |
| `table` | nf4, quantile, `levels...`, `affine...`, `signed...`, `zeros...`, `superblock32` |
| `trellis` | t3 |
| `whole` | mxint8 |
| `rounded` | both operands rounded to FP8 |
| `fine` | fine planes merged with coarse ones |
| `experts` | routed experts in tile order |

Which kernel multiplies, for bf16 activations (fp16 and fp32 activations are two and three bf16 summands, count as that
many tokens, and are never for the persistent kernel):

| weights | tokens | kernel |
| --- | --- | --- |
| nvfp4, mxfp4 in tile order | up to 16 (64 before sm_90) | `e2m1/narrow_gluon.py`: `mma.sync`, in registers |
| the same, sm_90 | 17 to 512, few and long rows from 9 | `e2m1/wide_gluon.py`: `wgmma`, K split |
| the same, sm_90, bf16 | 65 to 4096, where predicted fastest | `e2m1/persistent_gluon.py`: warp-specialized, TMA |
| the same, gradients to inputs, dY W | up to 4096, where predicted fastest | `e2m1/turned_gluon.py`: persistent |
| the same, `compute.fp8` | 512 and more | `rounded/fp8.py`: weights and activations to E4M3, scaled matmul |
| nf4, quantile, `levels...` (these: on no GPU yet) | up to 32, bf16 | `table/linear_gluon.py`: `prmt` lookups |
| codes with offsets (on no GPU yet) | up to 32, bf16 | the same, by bit arithmetic; sums of x by an operand of ones |
| nf4, quantile, sm_90, bf16 | up to 4096, where predicted fastest | persistent, with `table/operands_gluon.py` |
| mxint8 (run on no GPU yet) | up to 32, bf16 | `whole/linear_gluon.py`: scaled in registers, exact |
| t3 (run on no GPU yet) | up to 32, bf16 | `trellis/linear_gluon.py`: rotated inputs, codes decoded in registers |
| tiles, tables (not on sm_90), `levels...`, mxint8 | more, where predicted fastest | `e2m1/mma_gluon.py`: `mma.sync` |
| a fine plane, rows of whole blocks | any | `fine/merge_triton.py`, then cuBLAS |
| any of these | others | decode to the activations' dtype, then cuBLAS |
| other fine planes, `dense`, no Triton, tiles before sm_80 | any | the reference |

**Which GPUs** (`registry.Needs`, `devices.py`). Each record names the lowest compute capability that its device code
compiles for, and whether it is NVIDIA's: products of tiles, fused products of tables and of 8-bit integers, and experts
in tiles need the bf16 arithmetic of sm_80, FP8 sm_89; fine planes, decoding of tables and 8-bit integers, encoding,
pages of keys and values, residency of experts and the step between layers compile for sm_75. Plain Triton, without
Gluon and PTX assembly, may be chosen on AMD GPUs: the same list but the step between layers. Neither sm_75 nor an AMD
GPU has run any of them; tests and `scripts/compile_sweep.py` compile launches for NVIDIA's and AMD's targets.

**Choice of a launch** (`launch_table.py`). `choose` predicts the time of every tile and cut of the persistent kernel,
of every block and split of the wide one, and of decode-then-cuBLAS, from some forty measured constants, and takes the
least; no shape is named. Nothing searches unless it is called: `vbrt.tune` times other configurations for the layers of
a plan and keeps what wins, shape by shape, below `~/.cache/vbrt/tuning`, in a file for this GPU, version of Triton and
of the kernels; every family with a choice is searched (`tuning_families.py`), gradients are not. Choosing better does
not close the distance to cuBLAS: of 162 points at shapes that the constants were fitted to, the rule takes 0.91 of
cuBLAS where the best launch tried takes 0.93, and constants fitted to what a choice loses lose as much at shapes that
were left out. What is left lies in rounds that tiles do not fill, in sums of tiles that are cut, and in the fixed cost
of small layers (docs/measurements.md has the sweep).

**Launching** (`launcher.py`): little host work, constants checked against the kernel's signature when it compiles. On
sm_90 and newer each kernel is launched as a dependent of the one before: it starts as that one ends and waits for its
end before it reads results; kernels for few tokens have loaded their first weights by then. Starting at the start of
the kernel before instead of its end was slower (programs took its place on the multiprocessors unevenly); so was
prefetching weights into L2, by more the more was fetched.

**Compiling** (`compiling.py`) runs in threads ahead of the first launch: a first launch on a machine costs seconds for
each multiplication kernel. What to compile is not listed anywhere: the launching code runs in a mode in which a
`Launcher` notes what it would ask Triton for. Compiling holds the interpreter lock while Triton walks the kernel's
Python code, so what is not needed next is compiled by one thread only. Processes would not share the lock, but take
longer to import Triton and torch than a kernel takes to compile. Triton's C launch stubs are made ahead too. On an
H200's host, 8B shape in `fp4`, prompt of 128 tokens, nothing compiled before (`scripts/generate_cold.py`, which also
says how each first launch went): the first token comes after 2.5 s instead of 8.5, eager bf16's after 0.9; one
multiplication takes 2.0 s to compile, four of them beside each other, so no first token behind such a prompt comes
sooner; the second token comes 2.5 s later. A process that finds the kernels on disk reads all of them in a tenth of a
second, and has its first token before eager bf16 has.

**Under torch.compile** (`graph_pass.py`, `horizontal_fusion.py`). 4-bit layers that read one tensor (queries, keys,
values) are fused into one launch for up to 8 tokens; a gate and an up projection whose results only meet in `silu(gate)
* up`, or another of the kernels' activations, become a gated pair, which rounds once instead of three times. All are
found in the graph, not by a model's names: the activation as what inductor's decompositions make of it. A Llama layer's
seven linear launches become four. With one token, residual sums and RMS norms fuse too: the layer before adds the
residual, multiplies by the gain and leaves a sum of squares for each 16 results; the layers behind multiply their
results by the norm's factor.

**Without a GPU** tests run the PTX that Triton compiles (`tests/emulator/ptx.py`), a warp at a time, with `mma.sync`,
`wgmma`, barriers and TMA, on memory with bounds. That finds a wrong lane, mask or share of a tile, and a missing wait;
not a race between programs, nor a slow kernel.
"""

__all__: list[str] = []
