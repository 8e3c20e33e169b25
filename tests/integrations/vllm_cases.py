"""A tiny random model under vLLM, in a process of its own: prints its greedy tokens as JSON, and what vbrt counted.

python -m tests.integrations.vllm_cases llama|qwen2|qwen2_moe FOLDER [QUANTIZATION_CONFIG as JSON]
"""

import json
import sys
from pathlib import Path
from typing import Any

SIZES = {"vocab_size": 280, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),  # biases
    "qwen2_moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 128}),
}
PROMPTS = [[1, 2, 3, 4], [7] * 20, [5]]


def model_in(folder: Path, kind: str) -> str:
    import torch
    import transformers

    directory = folder / kind
    if not directory.exists():
        name, more = KINDS[kind]
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES | more))
        for parameter in model.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter)
        model.to(torch.bfloat16).save_pretrained(directory)
    return str(directory)


def main() -> None:
    kind, folder, *settings = sys.argv[1:]
    from vllm import LLM, SamplingParams

    from vbrt.integrations import vllm as plugin

    how: dict[str, Any] = {}
    if settings:
        plugin.register()
        config = {"quant_method": "vbrt", **json.loads(settings[0])}
        how = {"quantization": "vbrt", "hf_overrides": {"quantization_config": config}}
    llm = LLM(
        model_in(Path(folder), kind), skip_tokenizer_init=True, max_model_len=128, dtype="bfloat16", max_num_seqs=4,
        enforce_eager=True, **how,
    )  # fmt: skip
    greedy = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], greedy, use_tqdm=False)
    found: dict[str, Any] = {"tokens": [list(answer.outputs[0].token_ids) for answer in answers]}
    for vb in plugin.wrapped():
        stats = vb.stats()
        found |= {"layers": sorted(stats.layers), "formats": sorted({layer.format for layer in stats.layers.values()})}
        found |= {"moved": sum(sum(layer.bytes_moved.values()) for layer in stats.layers.values())}
        found |= {"fallbacks": list(stats.fallbacks)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
