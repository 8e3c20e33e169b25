"""Shared by saves and checkpoints: manifest, renaming, compatibility checks, tensor assignment."""

__all__: list[str] = []
