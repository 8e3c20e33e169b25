"""Capture and replay of decode steps: what `generate` runs in place of a model's forward.

A forward call enters (`step_io` takes it apart into tensors); `session` decides whether it can be captured, replays it,
compares the first replays with eager steps, and falls back with a reason. Fingerprints of the model's Python state and
code, a watch on mutations and a record of side effects say when a captured step no longer stands for the model.
"""

__all__: list[str] = []
