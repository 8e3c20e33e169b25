"""Self-speculation: coarse planes of `exact` weights draft tokens, one pass over the exact weights verifies them.

A prompt and generate's arguments enter; the tokens of plain decoding leave (or, by choice, tokens of the same
distribution), and counters of acceptance. `draft_length` chooses how many tokens to draft by measured acceptance and
times.
"""

__all__: list[str] = []
