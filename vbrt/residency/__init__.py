"""Residency: which pages should be in which tier. Pure Python, no bytes move, importable without torch.

Input: accesses and sizes. Output: decisions ("hit", "evict a and b, then load c"), and a `Plan` of a whole model.
`vbrt.tiers` executes decisions and makes none. `simulate` runs the same policy objects on a trace and gives exactly the
live stack's counts, as property tests check. For that, an access is counted when it is decided: a prefetched page is a
miss that was `prefetched`, however early its copy finished.

**Homes** (`plan.py`, `place`). Every page has one home: the first tier, from the computing one down, that can hold all
pages. Tiers above cache copies, as the policy decides. If no single tier holds everything, the lowest takes what fits
and the rest is at home above it. A tier that *fills* (`peer`) takes what fits before the tiers below
(`_place_filling`). `plan.skipped` lists the parameters that are not swapped, with their bytes; these, activations, and
the scratch for one decoded weight are outside the budgets.

**The policy `scheduled`.** A forward touches layers in the same order every time. On a cyclic scan larger than its room
LRU hits 0 %: it evicts each page just before its next use. Belady's optimum for n equal pages and room for r is (r −
1)/(n − 1). `scheduled` pins pages, evenly spread through the order, and streams the others through a ring with room for
one lease and `prefetch` pages ahead: (r − 1 − prefetch)/n hits, and misses are started before they are needed. Pins are
spread because a pinned prefix, at the same hit rate, leaves the link idle while it runs. The ring's slots all have the
size that leaves the fewest bytes to stream; larger pages are pinned, smaller ones take a whole slot
(`room_division.py`). So the memory of one page fits the next, and a steady pass neither frees nor allocates: fresh
memory costs a page fault every 4 KiB on the host, and a synchronization on a GPU. In the first pass, and if not even
one lease's slots and one more fit, pages are streamed in their own sizes.

**Phases** (`phases.py`). The user names a pass's phase, or it is inferred: `forward` with gradients; under `no_grad`
`decode` if the first input has one token per sequence, else `prompt`; `backward` begins with the first lease inside
autograd after a `forward`. One order is learned per phase (`pass_order.py`); the first pass of a phase follows the
previous phase's order until it deviates, and prefetches nothing from there on. A layer that is skipped, repeated or
moved costs misses in that pass and is learned for the next. A pass that stops early (an exception, Ctrl-C) is a prefix
of the last order and does not replace it; of two such passes in a row (early exit, layer skip) the longer one does. The
very first pass runs as LRU. A compiled model marks no pass and stays in the last phase: the first access of a completed
order begins the next pass. The predicted successor of a phase is its last one, once seen twice in a row (the first one:
once), so one evaluation between training steps changes nothing. A phase that repeats is predicted to repeat as often as
last time. There is one room, divided for one *round*: the cycle of predicted phases, a repeating phase counted up to
four times. Pages used most in a round are pinned first, so a draft's pages come before those that only verification
reads. 16 phases are remembered.

**Longer rings** (`ring_length.py`). For a pass that uses pages more than once, a longer ring may beat more pins. Once
such an order has repeated, the policy simulates longer rings and keeps the best one until the room changes by an
eighth, so activation checkpointing, which recomputes a block just before its backward, costs no third copy. The search
simulates ten passes or more, so it runs in steps of 0.1 ms, one per access.

**The policy `experts`** (rule: `expert_pool.py`) uses integers only, so that a GPU kernel decides identically, and
halves all scores at the same time, so that within an epoch only uses reorder pages and a heap suffices. Scope "layer"
gives every layer and plane an equal number of slots, "model" one pool; "layer" is the default: with little room,
pooling lost 5 to 6 points of hit rate on recorded routing (`scripts/routing.py`). A scan neither advances the clock nor
changes scores, so the working set of decoding stays resident. Other layers are needed in every pass: they are at home
in the computing tier if they fit there besides one token's experts, and experts are placed below; else a nested
`scheduled` policy gets the room first. When a budget shrinks, experts are evicted first. With `policy.routing`, a
recorded routing decides on the scope: the one that loads fewer bytes.

**Missed experts** (`miss_policy.py`, `bypassed_experts.py`). If the CPU may compute misses, it takes those of least
worth to the cache, as many as minimize the longer of link and CPU time. After the lease such a page is prefetched if a
slot is free, or if its worth, this use included, exceeds the victim's: on published reuse with room for 10 % of the
experts the hit rate is 57 % then, 49 % with the worth before this use, and 63 % if all are prefetched, with half as
many copies again, which would delay those of the next layers.

**Hosted weights** (`hosted_share.py`). Of the pages that do not fit, the CPU computes some where they lie: as many as
let link and CPU end together, spread evenly by bytes so that the link prefetches meanwhile. These are not leased: pins
and ring are divided among the others. Rates, room and the tokens of a pass decide on the share, no clock does. The ring
bounds how far the link runs ahead while the CPU computes, so candidates are compared in a simulated pass.

**Programmes** (`programme.py`). When a round of passes has repeated, a dry run on a copy of the policy simulates the
next one; if the policy's state recurs, the round is compiled to a static schedule: for each lease which pages are
pinned, which ring slots the others are in, and which copies start at its release. `vbrt.tiers.schedule` executes it.

A user-defined policy is checked (`user_policy.py`): a missing member of the protocol is a ConfigError before the model
changes, and a decision that would corrupt the accounting (evicting a page in use, exceeding the room) a TierError.
"""

__all__: list[str] = []
