"""Capture and replay of decode steps: `generate` runs them in place of a model's forward.

`session` decides per forward call: capture, replay, or eager fallback with a reason; it also checks the first replays
against eager steps. `step_io` flattens a call into tensors and back. `model_fingerprint`, `code_fingerprint`,
`mutation_watch` and `side_effects` detect when a captured step is stale, and protect the model's state.
"""

__all__: list[str] = []
