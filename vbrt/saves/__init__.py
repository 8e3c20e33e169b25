"""Models in files: manifest, save, safetensors, the names that transformers converts."""

__all__: list[str] = []
