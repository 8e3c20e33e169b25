"""Runs that tests of hosted weights and experts share."""

import torch

import vbrt

__all__ = ["computed", "generated", "shared_and_moved"]


def computed(vb: vbrt.VBModelWrapper) -> int:
    """Products of weights that the CPU has computed."""
    return sum(handle.computed for handle in vb._attachment.registry.handles)


def generated(vb: vbrt.VBModelWrapper, batch: int = 1, new: int = 24, **further):
    """Greedy `generate` on the GPU from random prompts of 16 tokens, logits included."""
    torch.manual_seed(1)
    ids = torch.randint(10, 1000, (batch, 16), device="cuda")
    how = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0} | further
    return vb.generate(ids, output_logits=True, return_dict_in_generate=True, **how)


@torch.no_grad()
def shared_and_moved(vb: vbrt.VBModelWrapper, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Likeliest next tokens of a text read one token at a time: with hosted weights, then with all moved; and
    `computed` after each."""
    tokens, counts = [], []
    for where in ("auto", "device"):
        vb._attachment.hosting.release()
        vb._attachment.hosting._where = where
        out, found = vb(text[:, :8], use_cache=True), []
        for at in range(8, text.shape[1]):
            out = vb(text[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
            found.append(out.logits[0, -1].argmax())
        tokens.append(torch.stack(found))
        counts.append(computed(vb))
    return *tokens, counts
