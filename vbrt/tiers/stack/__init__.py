"""The stack: a policy's decisions become movement of pages between storage tiers.

A lease of pages enters; while it lasts they are on the computing device. One lock guards the ledger (levels, pages,
slots); bytes move outside it, and so do files and rehoming.

Each tier is a level: tier, policy, slots. One without a policy keeps no copies, and pages from below pass by it. A slot
is queued, loading, ready or failed; one that is evicted while it is in use is doomed, and its last holder frees its
room. `decider.py` turns decisions into slots in the order of accesses; `mover.py` fills slots, the first that needs a
queued one claims it, a worker or the forward itself; `page_homes.py` gives a page its home.

**Waiting ends** because a slot waits only for what was decided before it: its source, earlier promises of room, the
room of evicted pages; a thread that waits to lease holds no lease. Rehoming also evicts copies that have not begun,
since they would hold the old home. `bounded_waits.py` bounds every wait: with an error that names page, tier, sizes and
holders after six looks, a second apart, where no other living thread uses, fills or rewrites a page; after ten minutes
without any change in the stack; and, for room, after an hour in which only others got some. Before it gives up it
collects garbage, for leases that only a cycle holds, and cancels the loads of threads that have died. The road not
taken is one limit for all: another thread's pass, or a slow drive, may take minutes, and a lease that never ends need
not be waited for at all.

**Streaming to a GPU.** The thread that leases a page also issues the copies that the policy wants next: where the
source is page-locked and a slot is free, that is one asynchronous H2D copy on the copy stream. A copy waits for the
event of the kernels that last read its slot, a kernel for the event of its copy; the host waits for neither, so it runs
ahead and the link always has the next copies queued, around the end of a pass into the next.

**Rewriting** (`page_rewrites.py`, training): from the moment that a weight's update is submitted its page is *due*: no
lease and no copy of it begins, and what has begun is waited for. After the update its copies above are refreshed in
their slots, so no policy notices, and live counts equal what `simulate` gives for a model that never changes. A store
gets a new file, which takes the old one's place. What an evicted copy still feeds is refreshed as well. Programmes
would copy without asking: there are none in such a stack. A ring of blocks asks, and brings anew what was rewritten.

**Put pages** (`device_arena.py`): kernels read an arena and its sources by address, so no budget and no rehoming moves
them while the arena's owner holds its claim. They do not count as travellers, so layers beside them may be captured.
Arenas whose addresses kernels read from a table are *unseen*: they come and go without a change of the stack's version,
so that captures stay valid.

**Loans** (`ledger.loans`): room of the computing tier that a schedule fills itself, one page with its home there. It is
asked back before any page gets a home, but for unseen ones below the top, or a tier another budget, so nothing that
decides about homes knows of loans.

**Counters** (`page_counters.py`, `page_census.py`): a layer of experts has thousands of pages, so its pages share a
`Tally`, to which a lease adds once. The census of pages is taken again only after a page was added, rehomed or retired,
so `stats()` and the change of a phase walk no pages.

**Ctrl-C**: `stack_lock.py` has the rules.
"""

__all__: list[str] = []
