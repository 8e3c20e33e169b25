"""Kernels for CPUs, in C: prebuilt for several instruction sets, or built on the machine that runs them.

| weights | tokens | kernel |
| --- | --- | --- |
| 4-bit formats, 8-bit integers | up to 8 (4 without AVX-512) | `linear.c` decodes and multiplies in registers |
| 4-bit formats, `compute.int8` | the same | the same with inputs in int8 (`int8.py`) |
| 4-bit, `mxint8`; AVX-512, for bf16 no AMX | more | `panels.h` decodes tiles into the cache, multiplies there |
| 4-bit, `mxint8`, elsewhere | more | decode, then torch's matmul (oneDNN takes AMX for bf16 by itself) |
| a fine plane | any | `linear.c` restores the weight in one pass, turned for Conv1D, then torch's matmul |
| routed experts of few tokens | | `experts.c`; in threads of their own: `expert_team.py`, `team.h` |
| hosted: a GPU's, of pages that stay in host memory | few | `hosted.c`, in threads of their own: `hosted.py` |

**Few tokens** (`dots.h`). The codes of 128 columns are 16 words; shifts bring one code each to the lowest bits, where a
permutation looks its level up; a lane sums the eight columns of its word, and the block's scale multiplies that sum.
bf16 inputs and levels that bf16 has (E2M1) are multiplied in pairs (`vdpbf16ps`), in half of the instructions. E4M3
scales are computed, as halves, in half of a table's instructions. A core waits for 24 lines at most that its L1 lacks
(Zen 4), whatever it computes; so codes and scales are prefetched into L2, 8 KiB ahead. Each thread has rows of its own
to begin with (`shares.h`): where threads took chunks in turns, what one prefetched was the other's. Memory on several
NUMA nodes is as the system places it, for want of a machine to measure on.

**Offsets** (kernel family "affine"): y = sum over blocks of scale (q x) + offset (sum of x), with the codes 0 to 15 as
levels, or -8 to 7 (`signed...`), whose offsets would be rounded if codes were counted from 0. Sums of x by block are
made once, behind the row of x in its layout, so a block's offset costs one product for each token: a sixteenth of a
vector. In integers they are sums of what x was rounded to: codes are not centered, and with exact sums an error of
rounding would count with the code, not with the weight. Tiles and decoded weights have the bits of the reference, which
rounds products with 32-bit scales before it adds the offset: so `linear.c` is compiled without contraction. Bytes a
second of one busy core of a Sapphire Rapids, one token, in shares of `nvfp4`: Q4_1 1.0 to 1.1 (its 5 bits take 0.97 to
1.07 of the time), Q4_K 0.9 to 1.0, AWQ with groups of 128 0.9 to 1.1; with AVX2 1.0 to 1.1, 0.9 and 0.9 to 1.0.

**8-bit codes** (`eight.h`) are converted, 32 columns at a time. Under scales alone, of 32 columns and more, the scale
multiplies the block's sum; in blocks of 16 (Q6_K) and with offsets (Q5_K) codes become weights first, one FMA for eight
or sixteen of them and all tokens. As bf16 pairs codes stay whole: halves of a vector have scales of their own, and an
offset multiplies the sum of x, one more `vdpbf16ps`.

**Zero points between codes** (HQQ; `eight.h`). A product needs each code's difference to the zero point rounded to the
scales' dtype, so no sum of x will do. Of 8 bits it is computed and rounded in fp32, for every code. Of 4 bits a block
has 16 differences, made once in a row and for up to four tokens, and looked up: with AVX2 as two tables of bytes.
Computing each took 1.4 times as long. Conversions bound both, not memory: on two cores of a Zen 3, 8192 x 4096, they
are 1.25 to 1.4 times as fast as the dense weight in bf16 with one token, 2.7 to 2.9 times with 4, 5.9 times with 64.

**int8 inputs**: a 32-bit lane of codes is a word of eight columns, so inputs have a scale for eight columns at no cost
(0.40 % of error for Gaussian inputs, where scales for 16, 32 and 64 would give 0.47, 0.54 and 0.59 %). `vpdpbusd` wants
one side unsigned: levels are 127 too large, for which a word's sum begins 127 times the sum of its inputs too low.
Pages are not repacked in interleaved rows: rows as they are reach the rate at which memory is read.

**Many tokens** (`panels.h`). torch's matmul on a decoded weight loses the decoding, and on tiles that fit the cache it
repacks the inputs for each. So with AVX-512 the product is ours: 32 rows are decoded into L1 and L2, 256 words of each
row at a time, turned so that a vector holds one column of 16 rows, and multiplied by panels of twelve tokens whose sums
stay in registers. No weight is decoded twice for 1020 tokens, and a token's bits do not depend on the others. Two cores
of a Zen 4, weights beyond the caches, 2048 to 5632 and back, in shares of torch's time on a dense weight: bf16 0.8 at
17 tokens, 0.9 at 32, 1.0 at 128 and 512; fp32 0.3 to 0.5 at 17, 0.8 to 0.9 from 512 on (`scripts/cpu_bench.py`).

**Instruction sets.** One source; what differs is in a file for each set (`dots_avx512.h`, `dots_avx2.h`, `dots_neon.h`,
`dots_plain.h`), chosen by compiler flags. A wheel has each source built for `avx512bf16`, `avx512vnni`, `avx512`,
`avx2` and `x86-64`, or `neon-bf16` and `neon` (`prebuilt/`, made by `hatch_build.py`). The first call of an op loads
the best that /proc/cpuinfo allows; where there is none, the compiler makes the same library with the same flags, so
tests run what users run, and bits are equal where the instruction set is. `build_cache.py` keeps it, named by a hash of
sources, compiler and flags, and checks a digest before loading. `stats().libraries` names what is loaded. AVX2 and NEON
look levels up by bytes (`vpshufb`, `tbl`): permutations of fp32, which came before, took longer at every number of
tokens. NEON with bf16 was never timed on such a CPU: an emulator runs the functions (`tests/emulator/arm.py`), with the
bits of x86; merging a fine plane has no vectors there, and up to 4 tokens are multiplied fused.

**Start to first token** (`scripts/cpu_bench.py --part start`, docs/measurements.md): for saved planes of a 1.1 B Llama,
torch's import takes 1.2 s, transformers and its class of the model 2.7 (they import torch._dynamo, which
`torch.compiler.disable` would otherwise: 1.7 s for models that are not of transformers), vbrt's modules 0.7, loading
1.4 and the first token 0.2. Loading is mostly one read of the file into huge pages that no process has touched.

**Threads.** A library names no OpenMP runtime: `threads.c` has the few functions that gcc calls and forwards them to
the runtime that torch's own library is bound to, so there is one pool. Where the CPU computes, OpenMP's threads also
read pages from the page cache (`reading.c`: `pread` by segments, each segment's XXH3-64 while it is in cache), and no
other thread wakes up for a token.

**The experts' team** (`expert_team.py`). A job is both products of a layer for all of its missed experts, and costs the
launching thread one call. Threads take chunks of rows from ranges of their own and then from others'; an expert's
second product begins when its first is done; the job ends when its chunks are done, not when all threads have come, so
one that wakes late or shares its core delays no other. OpenMP's regions end with their last thread, which beside other
processes made two calls several times as long as a job. Threads spin for twice as long as they waited last, 3 ms at
most, then sleep. None of them waits for Python's lock: one that did began when the main thread stopped launching. Two
threads are left to others (`thread_counts.py`): the one that launches and the one that copies. Pages in tile order,
made for a GPU, are multiplied as they lie (`tiled.h`). CPUs that multiply pairs of bf16 make 32 weights with one
`vpermw` by three bits of magnitude and one `vpternlog` for the sign. Others with AVX2 or AVX-512, and fp16 everywhere,
take x in 16-bit fixed point (`tiled_avx2.h`): a `vpmaddubsw` brings the bits of a code together, a `vpshufb` makes it a
16-bit integer, and `vpmaddwd` multiplies. Rows g and g + 8, both halves of their blocks and two lanes of a tile are
eight sums, in the order in which their scales are stored. Elsewhere, and for fp32, `tiles.c` reorders a call's pages
into memory that is kept, because the C library gave it back each time.

**Hosted products** (`hosted.py`, `hosted.c`). A GPU's step, recorded or not, writes x and a post into page-locked
memory and waits there for y; threads that poll it multiply x by pages where they lie. Everything about a product is
prepared when it is entered: a post costs a look at the entry, and x in the layout of the kernels. A thread that takes a
post opens the job for all, whose items are small enough that the last ones end together; it answers when all are done.
Round trip of a weight of 2 KB: 2 to 4 us on two busy cores, with a Python thread as the device
(`scripts/mailbox_bench.py`). Threads stay awake while posts are expected: they spin for 2 ms after the last one, then
nap for 30 us at a time.

**A captured step** (`step.c`, `step.py`): norms with their sums, rotary embeddings with the cache's writes, gates,
routers, small dense products and attention are one C call each; those that follow each other, and products of few
tokens, are one program, whose calls C makes.

**Small batch** (`small_batch_linear.py`): for pages that never move, arguments are prepared once, the inputs are in a
buffer that the thread keeps, and layers of one input are computed in one call, which spreads the inputs and wakes the
threads once.

**Encoding** (`encode.c`): sixteen blocks go together, one in each lane of a vector: 230 M weights a second of a core in
`nvfp4`, 500 in `mxfp4`, 190 in `nf4`, 80 in the formats of 16 levels (a candidate scale for each level), 320 in
`mxint8` (`scripts/cpu_encoding.py` times whole models). The library is loaded or built once 2 M weights have come in
all, which is what building it is worth. For `quantile` it also counts bit patterns and clipped weights; the fit on
65,536 sampled weights stays in torch.

**Optimizer update** (`update.c`) joins the halves of a master, steps and splits in one pass over memory (26 bytes a
parameter for AdamW); 8-bit moments are decoded and encoded in the same pass. It has the bits of torch's fused
optimizers because it repeats which products and sums they round once, at the ends of weights too; since that depends on
how torch was compiled, bits are compared as the code is built, and where one differs torch's own code runs.
"""

__all__: list[str] = []
