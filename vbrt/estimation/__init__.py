"""What a model and a task take, before anything is loaded: memory traced on fake tensors, pages from the plan.

`memory` counts bytes, `advice` predicts times and compares configs, `precision` measures what layers lose. Pages and
kept parameters come from the plan that wrapping follows (`make_plan`), so the two cannot drift.
"""

__all__: list[str] = []
