"""The ways in: `wrap`, `load` and the wrapper that stands for its model.

A model, or an object that holds some, enters with a config; a façade leaves. `wrapper.py` holds the model and its
`Attachment` and adds only what a façade can: attributes, protocols, copies, and running a forward again after it ran
out of GPU memory. `model_proxy.py` says what is passed on, and why the wrapper is neither a subclass of the model's
class nor its parent: parameters, buffers and modules are found in the model's own dicts under the model's names. Where
both have a name it is the model's, since state dicts name attribute paths; code here that is given a wrapper of any
model asks `vb.vbrt`, which has the wrapper's under all names. `wrap` tries an ssd path before anything is planned.

**Objects that hold models** (`wrap_pipeline.py`). A `HolderKind` (`pipeline_kinds.py`) says where its models are, which
methods must not be called once they are wrapped, which phases their passes have, and what may already move them.
Integrations register kinds under library and base class name (`registered_kinds.py`, which imports nothing); the record
is imported when such an object is wrapped, its library never. An object without a record is taken if one of its
attributes is a module; of several, each is named. All models go onto one runtime, or none. A model that is wrapped
already brings its runtime, and the others join it.

**Phases of a call.** Each model's phases begin with its name. Denoisers have `step`, autoencoders `image`; text
encoders have what their inputs tell, numbered by their runs since the last step. The policy expects after a phase what
followed it last: with guidance a text encoder is followed once by a text encoder and once by the transformer, and
without numbers the circle of text encoders would be all that recurs. An autoencoder is called by `decode`, not
`forward`: `EntryHook` begins its pass, by accelerate's protocol `_hf_hook`.

`watch_nonfinite` puts a forward hook on each module for the length of a `with` block. Hooks of inner modules run first,
so the first module whose output holds NaN or Inf is the earliest and innermost one.
"""

__all__: list[str] = []
