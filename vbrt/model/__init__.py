"""From a model to VB layers on a runtime: plan, attachment, passes, budgets, and models that share them.

A module and a config enter. `planner.py` inspects modules and decides without touching a weight (`weight_choice.py`:
which weights go into the tiers, and why each of the others stays); `attach.py` changes classes in place. `Attempt`
remembers classes, parameters, buffers, hooks and the homes of other models' pages before anything changes; until the
caller has the result, any exception undoes it.

**Runtime and attachment.** `Runtime` is one stack, one budget for each tier, the balance that follows the GPU's free
memory, and the models on it. An `Attachment` is what belongs to one model: config, plan, registry (name → VB layer),
passes, counters. References run model → pass hook → attachment → runtime; attachments and registries refer to the model
and its layers weakly, so a model without references is freed at once, with its pages. A further model's tiers and
policy are the runtime's; a key that its config says otherwise is refused by name (a dict says the keys it has, a preset
or file those that differ from the defaults). One call of `place` plans the pages of all models; pages of the first
model move when the second comes, and get their old homes back if that fails. Page keys, errors and phases of a further
model begin with its name. The stack closes with its last model or copy.

**Choice.** `output_heads.py` finds the layers that `keep_head` keeps from what models say of themselves: output
embeddings, what a model for a task has outside its base model (unless that is a tenth of it), timm's classifier; names
decide only where a model says nothing. A storage that several modules hold goes for all of them or stays for all. A
model that has a `device` keeps one parameter to tell it by: where everything else is swapped, the smallest table stays.
Layers whose class, or instance, has another library's forward as the model is wrapped stay.

**Budgets.** `set_budget` encodes what is not encoded, for all models, counts what the tier holds as free, and has the
stack rehome pages. With `budget = "auto"` on the GPU (`auto_budget.py`) the margin that was left free belongs to the
model: when half of it is gone the budget shrinks before a pass, and it grows back when there is room. A look takes
about a millisecond of the host, so it comes at most every 500 of its own lengths. A pass that needs more than the
margin at once runs out of memory: the margin doubles, pages are evicted, and `vb(x)` runs the pass again unless that
could differ (training mode, or an argument that may have been changed, such as a cache).

**Hosted weights** (`hosting.py`). Before steps of few tokens it asks `residency/hosted_share.py` which of the weights
that do not fit the CPU computes where they lie, by rates measured once on the model's own pages, and changes their
state. The choice is kept until budgets, homes or the number of tokens change; recorded steps are valid for one choice.
Measured rates are rounded, so that runs on one machine mostly choose the same pages, and so give the same bits.

**Passes** (`pass_hooks.py`). The hook that waits for the end of a pass is on a model only while there are unencoded
weights. A forward that was set on the wrapper may run parts of the model alone, so the wrapper's call is the pass then.
PEFT parametrizes parameters, and encoded experts have none; it would warn that it matched nothing, so the pass hook
looks at `peft_config` and names layer and remedy (`adapter_refusals.py`). Live samples (`live_sampling.py`): what
another thread changes while it is read is read again.
"""

__all__: list[str] = []
