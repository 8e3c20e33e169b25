"""Self-speculative decoding: coarse planes of `exact` weights draft, one pass over the exact weights verifies.

The tokens are those of plain decoding, or by choice of the same distribution. `draft_loop` runs the rounds,
`verification` computes exact logits, `draft_length` adapts the number of drafts to measured acceptance and times.
"""

__all__: list[str] = []
