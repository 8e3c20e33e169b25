"""Weights of E2M1 codes in tile order: nvfp4 and mxfp4. Fused dequantize-and-multiply kernels, and the encoder.

`tiles.py` is the page order: codes and scales as the matrix instruction wants them, unpacked exactly wherever something
else needs them. `linear.py` picks a kernel by `launch_table.choose`; `launches.py` takes a weight and a configuration
and decides nothing. No kernel here needs scratch memory for a decoded weight.

**Persistent kernel**: tiles of 128 rows by 32, 64, ... or 256 tokens, so most counts are padded by a few percent. The
last tile reaches back to tokens that another one stores: TMA takes longer for rows that are not there than for those
that are. What limits tiles of fewer than 256 tokens was measured on an H200: two columns of a tile take 1.2, 1.6, 1.85,
2.3 and 2.7 us with 32, 64, 128, 192 and 256 tokens, where the matrix instructions alone would take 0.3, 0.6, 1.2, 1.7
and 2.3. The rest is decoding, which overlaps with the other warpgroup's instructions but hardly with its own; a third
of that is the lanes' exchange. *Ordered* launches do without the exchange: a short launch before puts activations into
the tiles' order (1.25, 1.55, 2.1 and 2.8 us with 64, 128, 192 and 256 tokens, plus 0.5 us and 0.1 ns for each token and
column). They win with tiles of 64 to 224 tokens and lose at 256.

Roads not taken. Decoding once to a buffer that stays in L2, for cuBLAS: decoding takes what its bytes take, about 0.4
us a million weights, and one more launch; a matmul of 400 tokens takes 1.2 us a million weights, so 0.75 at best, and
the two do not overlap because cuBLAS leaves no registers for another program. Warps that decode to shared memory for
warpgroups that multiply from there: with activations read by both warpgroups that is 128 bytes a clock and
multiprocessor, all there is, at 256 tokens, and more with fewer; register operands need 96.

**Few tokens** (`narrow_gluon.py`, `wide_gluon.py`). On an H200, for 4096→14336, issuing the instructions takes more
than half of what reading the weights takes. The rest at one token is the first loads' latency and the sum over warps,
which do not depend on K: so K = 2730 reaches 0.67 of the bandwidth of K = 4096. A warp has six scoreboards to wait for
loads by. Weights read ahead are waited for too early where they share one with activations; which loads do is ptxas's
choice, and a few lines' order changes it. On an H200 a gated pair that waited after two of sixteen products took 8 to
15 % longer than one that waits after eight or twelve; `scripts/scheduling.py` reads from machine code where a kernel
waits. No test asserts what another compiler may schedule otherwise.

**Fused launches** (`fused_linear.py`): a gated pair is one launch for up to 16 tokens, and two where rows are longer
than the matrix is tall, which was faster. A norm before a layer is a short kernel of its own, and the layer's has begun
by then: gathering the statistics inside the layer's launch was slower in most cases.

**Encoder** (`encode_triton.py`): scales are searched and weights rounded in registers, with the reference's operations
in the reference's order; packing fills a tile in each program. Plain torch took some hundred launches for 4 million
weights, and the host's time for them was half of what a model took to be ready (`scripts/experts_ready.py`).
"""

__all__: list[str] = []
