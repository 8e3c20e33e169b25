"""Estimates before anything is loaded: memory of a task, advice on configs, precision by layer."""

__all__: list[str] = []
