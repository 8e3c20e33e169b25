"""Comparison of greedy tokens whose logits were rounded differently."""

import torch


def largest_gap(vb, asked, wanted, found):
    """By how much, in standard deviations of the logits, tokens that were found instead of others fall short of these.

    After the first of them a sequence has other tokens to go on from, and is compared no further. 0.0: all are equal.
    """
    gaps = [0.0]
    for name, ids in asked.items():
        pairs = zip(wanted[name], found[name], strict=True)
        at = next((number for number, (want, got) in enumerate(pairs) if want != got), None)
        if at is not None:
            with torch.no_grad():
                given = torch.tensor([[*ids, *wanted[name][:at]]], device=vb.device)
                logits = vb(given).logits[0, -1].float()
            gap = logits[wanted[name][at]] - logits[found[name][at]]
            gaps.append(float(gap.abs() / logits.std()))
    return max(gaps)
