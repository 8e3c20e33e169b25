"""Residency: which pages should be in which tier. Pure Python, no bytes move, importable without torch.

Accesses and sizes enter; decisions leave ("hit", "evict a and b, then load c"), and a `Plan` of a whole model.
`vbrt.tiers` acts on decisions, and nothing else decides. `simulate` runs the very policy objects on a trace and gives
exactly the live stack's counts; property tests hold the two together. For that, what counts is settled when a page is
leased: a page that was prefetched is a miss that was `prefetched`, however early its copy finished.

**Homes** (`plan.py`, `place`). Every page has one home: the first tier, from the computing one down, that can hold all
pages. Tiers above keep copies while the policy wants them. Where no single tier holds everything, the lowest takes what
fits and the rest is at home above it. A tier that *fills* (`peer`) takes whole pages before the tiers below are asked
(`_place_filling`). `plan.skipped` names, with their bytes, the parameters that are not swapped; these, activations, and
the scratch for one decoded weight are in no budget.

**The policy `scheduled`.** A forward touches layers in the same order every time. On a cyclic scan larger than its room
LRU hits 0 %: it evicts each page just before its next use. Belady's optimum for n equal pages and room for r is (r −
1)/(n − 1). `scheduled` pins pages, evenly spread through the order, and streams the others through a ring with room for
one lease and `prefetch` pages ahead: (r − 1 − prefetch)/n hits, and misses are started before they are needed. Pins are
spread because a pinned prefix, at the same hit rate, leaves the link idle while it runs. The ring's slots all have the
size that leaves the fewest bytes to stream; larger pages are pinned, smaller ones take a whole slot
(`room_division.py`). So the memory of one page fits the next, and a steady pass neither frees nor allocates: fresh
memory costs a page fault every 4 KiB on the host, and a synchronization on a GPU. Where not even one lease's slots and
one more fit, and in the first pass, pages come in their own sizes.

**Phases** (`phases.py`). The user names a pass's phase, or it is inferred: `forward` with gradients; under `no_grad`
`decode` if the first input has one token a sequence, else `prompt`; `backward` begins with the first lease inside
autograd after a `forward`. One order is learned for each phase (`pass_order.py`); a first pass follows the order of the
phase before it until it differs, and prefetches nothing from there. A layer that is skipped, repeated or moved costs
misses in that pass and is learned for the next. A pass that stops early (an exception, Ctrl-C) is a prefix of the last
order and does not replace it; of two such passes in a row (early exit, layer skip) the longer one does. The very first
pass runs as LRU. A compiled model marks no pass and stays in the last phase: the first access of a completed order
begins the next pass. After a phase comes what followed it last, once that has happened twice in a row (at first: once),
so one evaluation between training steps changes nothing. A phase that repeats is expected to repeat as often as last
time. There is one room, divided for one *round*: the phases that follow each other in a circle, a phase that repeats
counted up to four times. Pages used most in a round are pinned first, so a draft's pages come before those that only
verification reads. 16 phases are remembered.

**Longer rings** (`ring_length.py`). A pass that uses pages more than once may want a longer ring instead of more pins.
Once such an order has repeated, the policy tries longer rings out on it and keeps the best until the room changes by an
eighth, so activation checkpointing, which runs a block forward again just before its backward, costs no third read.
Trying takes ten passes' worth of decisions and more, so it is done in steps of a tenth of a millisecond, one with each
lease.

**The policy `experts`** (`expert_pool.py` has the rule) uses whole numbers only, so that a kernel decides alike, and
halves all scores at the same moments, so that within an epoch the order of pages changes only by use and a heap serves.
Scope "layer" gives every layer and plane an equal number of slots, "model" one pool; "layer" is the default: with
little room, pooling lost 5 to 6 points of hit rate on recorded routing (`scripts/routing.py`). A scan moves no clock
and changes no score, so what decoding gathered stays. Other layers are needed in every pass: they live in the computing
tier if they fit there beside one token's experts, and experts are placed below; else a `scheduled` policy inside gets
the room first. When a budget shrinks, experts leave first. `policy.routing` reads recorded routing and takes the scope
that loads fewer bytes.

**Missed experts** (`miss_policy.py`, `bypassed_experts.py`). Where the CPU may compute misses, those of least worth to
the cache are computed by it, as many as make the longer of link and CPU shortest. After the lease such a page is staged
if a slot is free, or if it is worth more than the victim, this use counted: on published reuse with room for 10 % of
the experts 57 % of the leases hit then, with the worth before this use 49 %, and 63 % if all were staged, with half as
many copies again, which would hold up what the next layers fetch.

**Programmes** (`programme.py`). When a round of passes has repeated itself, a copy of the policy runs through the next
one; if its state comes back, the round is worked out once: for each lease which pages stay, which ring slot the others
are in, and which copies begin at its release. `vbrt.tiers.schedule` runs it.

A policy of the user's is held to the protocol (`user_policy.py`): what it lacks is named before the model changes, and
a decision that would break the ledger (evicting a page in use, too much room) is a TierError that names it.
"""

__all__: list[str] = []
