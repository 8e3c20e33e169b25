"""What a step reaches of a machine's rates, on a GPU and on a CPU: shares of peaks, and launches that things cost.

Fitted to measured times: on an H200 to those of docs/benchmarks.md, on a CPU to benchmarks/results/cpu-peers.json and
advice-cpu.json (two Zen 4 cores). `scripts/times.py` shows all of them beside what is predicted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["SHARES", "Shares"]


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the rates of `Rates`, of copies (`memory_gb_s`) unless said otherwise.

    Attributes:
        reads: at which products of one token read dense weights; reads_packed: and 4-bit ones, by the family of their
            kernels; reads_cache: and attention keys and values.
        moves: at which all other operators read and write.
        matmul: of the rate of large products, over a whole pass; matmul_train: in 16 bits with its backward pass;
            packed: of that, by 4-bit weights.
        attention: of the rate of products in fp32, of fused attention in any dtype; 0: it is as fast as other products.
        merged_bytes: of copies, that take as long as it takes to restore a weight from two planes and multiply by it.
        operator: bare launches that an operator takes by task, with Python around it; "recorded": in a step that C
            replays.
        routed_us: host time of a layer of routed experts in a step that is not recorded.
        queued: the device works while the host launches what comes next.
        repacks: products of experts take the time in which matrices are made ready for them, `Rates.repack_s`.
    """

    reads: float
    reads_packed: Mapping[str, float]
    reads_cache: float
    moves: float
    matmul: float
    matmul_train: float
    packed: float
    merged_bytes: float
    attention: float = 0.0
    operator: Mapping[str, float] = field(default_factory=dict)
    routed_us: float = 0.0
    queued: bool = True
    repacks: bool = False


#: by the tier that computes
SHARES = {
    "gpu": Shares(
        reads=0.57,
        reads_packed={"e2m1": 0.75, "table": 0.28, "int8": 0.50},
        reads_cache=0.25,
        moves=0.52,
        matmul=0.90,
        matmul_train=0.65,
        packed=0.93,
        merged_bytes=21,
        operator={"prefill": 2.2, "decode": 4.0, "train": 4.5},
        routed_us=2600,
    ),
    "cpu": Shares(
        reads=0.52,
        reads_packed={"e2m1": 1.0, "table": 0.67, "int8": 1.0},
        reads_cache=0.25,
        moves=0.52,
        matmul=1.0,
        matmul_train=0.65,
        packed=1.0,
        merged_bytes=10,
        attention=0.35,
        operator={"prefill": 5.5, "decode": 5.5, "recorded": 0.7, "train": 5.5},
        routed_us=600,
        queued=False,
        repacks=True,
    ),
}
