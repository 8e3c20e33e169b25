"""Checkpoints as others publish them: dense, quantized in a published layout, or GGUF.

Files enter; pages of vbrt's formats leave without decoding where the layout allows it, decoded weights where not.
"""

__all__: list[str] = []
