"""File formats: safetensors, GGUF and JSON, read and written tensor by tensor, headers validated first."""

__all__: list[str] = []
