"""What a model and a task take, before anything is loaded: memory traced on fake tensors, pages from the plan."""

__all__: list[str] = []
