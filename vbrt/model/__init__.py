"""From a model to VB layers on a runtime: plan, attachment, passes, budgets, and models that share them."""

__all__: list[str] = []
