"""Files as bytes: safetensors, GGUF and JSON, read and written a tensor at a time, with checks before anything is
believed.
"""

__all__: list[str] = []
