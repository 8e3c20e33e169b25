"""One token of a Llama-8B-shaped model, bf16 against FP4, everything resident, static KV cache, one torch.compile.

Random weights, made on the GPU. Both models are timed as `torch.compile(mode="reduce-overhead")` runs them, by the host
clock around a synchronized call, median of the second half of the calls. Writes what it measures as JSON.
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  # after the checkout is on the path

import vbrt  # noqa: E402

PROMPT, CALLS, CACHE = 64, 40, 512


def build(layers: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
                         num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
                         tie_word_embeddings=False)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


@torch.no_grad()
def decode_ms(model: torch.nn.Module, compiled: bool) -> float:
    """Milliseconds a token, after a prompt."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=CACHE)

    def step(ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, cache_position=position, position_ids=position[None], past_key_values=cache,
                     use_cache=True).logits

    ids = torch.randint(0, 1000, (1, PROMPT), device="cuda")
    model(input_ids=ids, past_key_values=cache, use_cache=True, cache_position=torch.arange(PROMPT, device="cuda"))
    run = torch.compile(step, mode="reduce-overhead") if compiled else step
    token, times = ids[:, :1].clone(), []
    for call in range(CALLS):
        position = torch.tensor([PROMPT + call], device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(token, position)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    late = sorted(times[CALLS // 2 :])
    return late[len(late) // 2]


def measure(layers: int, *, eager: bool = False) -> dict[str, object]:
    model = build(layers)
    result: dict[str, object] = {"layers": layers, "weights_gb": torch.cuda.memory_allocated() / 1e9}
    if eager:
        result["bf16_eager_ms"] = decode_ms(model, compiled=False)
    result["bf16_ms"] = decode_ms(model, compiled=True)
    torch.compiler.reset()
    start = time.perf_counter()
    vb = vbrt.wrap(model, "fp4").materialize()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    result |= {"encode_s": time.perf_counter() - start, "fp4_weights_gb": torch.cuda.memory_allocated() / 1e9}
    if eager:
        result["fp4_eager_ms"] = decode_ms(model, compiled=False)
    result["fp4_ms"] = decode_ms(model, compiled=True)
    result["speedup"] = result["bf16_ms"] / result["fp4_ms"]
    result["fallbacks"] = list(vb.stats().fallbacks)
    vb.close()
    torch.compiler.reset()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--eager", action="store_true", help="also without torch.compile")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    print(json.dumps(measure(options.layers, eager=options.eager), indent=1))


if __name__ == "__main__":
    main()
