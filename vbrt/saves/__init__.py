"""Checkpoints, saves and conversion: read, write and map weights in safetensors, GGUF and vbrt's own files."""

__all__: list[str] = []
