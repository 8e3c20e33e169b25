"""Models in files: checkpoints of others in, saves and training checkpoints in and out.

`files` reads and writes bytes, `common` is shared, `published` and `saved` are the two sorts of sources, `load` fills a
runtime from either, `convert` writes a save without the model, `checkpoint` is training. Where weights come from is for
`open_source` (`load/sources.py`) to say, once, for `vbrt.load`, `from_pretrained`, the commands and conversions.
"""

__all__: list[str] = []
