"""Saves of wrapped models: `vb.save` writes encoded planes, whole or per rank; read back here."""

__all__: list[str] = []
