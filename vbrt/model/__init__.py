"""From a model to VB layers on a stack: the plan."""

__all__: list[str] = []
