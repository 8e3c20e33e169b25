"""VB layers: the modules that take the place of nn.Linear, nn.Embedding, Conv1D and their subclasses."""

__all__: list[str] = []
