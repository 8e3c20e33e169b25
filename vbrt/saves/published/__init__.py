"""Published checkpoints: dense, quantized in another library's layout, or GGUF.

Files enter. Weights leave as planes of vbrt's formats, without decoding, where the layout matches one; else decoded.
"""

__all__: list[str] = []
