"""Published checkpoints: dense, quantized in another library's layout, or GGUF.

Files enter; pages of vbrt's formats leave without decoding where the layout allows it, decoded weights where not.

`packed_files.py` shows a quantized checkpoint's files as those of a dense one: names, shapes and dtypes are the
model's, so transformers' renamings and merges work as they are. `published_checkpoint.py` then asks which of the files'
weights a parameter is made of: where all are of one format of vbrt, lie in rows below each other and share what a plane
has once, their planes are taken as they are, expert by expert; else they are decoded (`decode_layouts.py`). Weights
that the checkpoint has not quantized are held `dense`. What is decoded is in `plan.fallbacks`, and so in
`stats().fallbacks`. A layout's `as_it_is` says that its planes are bytes of the files; others are repacked on the host.

**GGUF** goes the same way with other tensors. `gguf_rules.py` asks transformers what a model's parameters are made of:
names, and operations on values. What an operation does to rows is found by applying it to numbered rows. If all rows
come out whole, the bytes of quantized rows can be moved in the same way, whatever their type: Llama's queries and keys
in another order, gates above up projections in a stack of experts, GPT-2's weights turned. So no architecture is named,
nor are classes of experts that hold them transposed or with gates between values (`gguf_experts.py`): they say so
themselves. What is not a movement of rows (norms less one) is applied to decoded values. `gguf_checkpoint.py` shows
each such parameter as a quantized weight in the dtype that the model has, since a GGUF file names none. All that
`vbrt.formats.ggml` cannot repack is decoded by `gguf.dequantize`, a few rows at a time.
"""

__all__: list[str] = []
