"""Routed ids to slots on the device: the rule of `vbrt.residency.expert_pool`, decision for decision.

One program makes all decisions of a lease. Importing this needs Triton; plain operations only, so that its interpreter
runs it too. The tables are int64:

    pages [7, pages]    per page: its slot or -1; score; time of its last lease; the last lease that routed to it,
                        scans included; hits; misses; misses that the host computed
    slots [3, slots]    per slot: its page or -1; its position in the window's queue, 0 in the main part; its address
    clocks [8]          per pool: time; leases, scans included; slots in use; positions of the queue's two ends; slots
                        that may be used: the first ones; maximum newcomers among the resident pages
    routed [8]          per layer: its last lease, or 0 after a scan; leases except scans; ids they named; experts that
                        they touched; of those, the ones touched right after another lease; and by that one, too;
                        leases whose misses the host could all compute
    shares [E + 1]      of a layer: how many misses the host computes, by the number of misses in a lease

The host computes the misses of least value: frequent ones are fetched, and stay. Where a share leaves none to fetch,
every second such lease fetches one nevertheless, or the resident experts would never change.
"""

import triton
import triton.language as tl

__all__ = ["resolve_kernel"]

_NONE = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_EXPERTS = tl.constexpr(1 << 20)  # more than a layer has
_AGES = tl.constexpr(1 << 38)  # key = value * _AGES - age: values are below 2^24, ages are clamped to this


@triton.jit
def _value(score, last, now, epoch):
    """Decayed score: halved for each epoch of leases that began since the page's last one."""
    return score >> tl.minimum(now // epoch - last // epoch, 62)


@triton.jit
def _least(value, mask):
    """Minimum of the values where `mask` holds."""
    return tl.min(tl.where(mask, value, _NONE))


@triton.jit
def _hosted(missing, count, worth, e, share_ptr, lone_ptr):
    """Choose the misses that the host computes: as many as its share, of least (worth, number)."""
    share = tl.load(share_ptr + count)
    whole = (count > 0) & (share == count)
    lone = tl.load(lone_ptr) + whole.to(tl.int64)
    tl.debug_barrier()  # all threads have read it
    tl.store(lone_ptr, lone)
    share -= (whole & (lone % 2 == 0)).to(tl.int64)
    key = worth * _EXPERTS + e
    chosen = missing & (e < 0)
    for _ in range(share):
        chosen = chosen | (key == _least(key, missing & (chosen == 0)))
    return chosen & missing


@triton.jit
def _count_routed(routed_ptr, routed, before, lease, named, SCAN: tl.constexpr):
    """Update the layer's counters; `before`: the lease that last routed to each expert."""
    if SCAN:
        tl.store(routed_ptr, 0)
    else:
        last = tl.load(routed_ptr)
        touched = tl.sum(routed.to(tl.int64))
        again = tl.sum((routed & (before == last)).to(tl.int64))
        tl.store(routed_ptr, lease)
        tl.store(routed_ptr + 1, tl.load(routed_ptr + 1) + 1)
        tl.store(routed_ptr + 2, tl.load(routed_ptr + 2) + named)
        tl.store(routed_ptr + 3, tl.load(routed_ptr + 3) + touched)
        if last > 0:
            tl.store(routed_ptr + 4, tl.load(routed_ptr + 4) + touched)
            tl.store(routed_ptr + 5, tl.load(routed_ptr + 5) + again)


@triton.jit(
    do_not_specialize=["P", "experts", "first_page", "pages", "first_slot", "slots", "all_slots", "epoch", "second_at"]
)
def resolve_kernel(
    id_ptr,
    page_ptr,
    slot_ptr,
    clock_ptr,
    source_ptr,
    address_ptr,
    fetch_ptr,
    routed_ptr,
    share_ptr,
    mark_ptr,
    kept_ptr,
    P,
    experts,
    first_page,
    pages,
    first_slot,
    slots,
    all_slots,
    epoch,
    second_at,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    IDS: tl.constexpr,
    ONE: tl.constexpr,
    SCAN: tl.constexpr,
    HOSTS: tl.constexpr,
    PLANES: tl.constexpr,
):
    """Lease the experts in `ids` [P], once each; grid (1,).

    The layer's pages are first_page .. + experts, its pool's slots first_slot .. + slots. Writes each leased expert's
    address to address_ptr [experts]; and to fetch_ptr [1 + 3 PLANES EXPERTS] the number of pages to fetch, their
    sources, targets and sizes. EXPERTS, SLOTS: powers of two that hold them.

    PLANES: pages of an expert, that are one to these tables; the second one goes `second_at` bytes behind the slot's
    beginning. source_ptr [2 PLANES, pages]: of each plane the addresses, and the sizes in 4096 bytes.

    epoch: in leases. SCAN: the lease is part of a scan. HOSTS: the host computes a share of the misses: of these ids,
    kept_ptr [P] gets -1; mark_ptr [EXPERTS] is scratch memory.
    """
    lease = tl.load(clock_ptr + 1) + 1
    now = tl.load(clock_ptr)
    if not SCAN:
        now += 1
    lease_ptr = page_ptr + 3 * pages
    e = tl.arange(0, EXPERTS).to(tl.int64)
    page = first_page + e
    before = tl.load(lease_ptr + page, mask=e < experts, other=0)
    tl.debug_barrier()
    named = 0
    for at in range(0, P, IDS):
        i = at + tl.arange(0, IDS)
        id = tl.load(id_ptr + i, mask=i < P, other=-1).to(tl.int64)
        known = (id >= 0) & (id < experts)
        tl.store(lease_ptr + first_page + id, tl.zeros_like(id) + lease, mask=known)
        named += tl.sum(known.to(tl.int32))
    tl.debug_barrier()

    place_ptr = page_ptr + page
    routed = tl.load(lease_ptr + page, mask=e < experts, other=0) == lease
    place = tl.load(place_ptr, mask=routed, other=0)
    hit, missing = routed & (place >= 0), routed & (place < 0)
    missing_count = tl.sum(missing.to(tl.int64))
    score = tl.load(place_ptr + pages, mask=routed, other=0)
    last = tl.load(place_ptr + 2 * pages, mask=routed, other=0)
    worth = _value(score, last, now, epoch)
    if not SCAN:
        tl.store(place_ptr + pages, worth + ONE, mask=routed)
        tl.store(place_ptr + 2 * pages, tl.zeros_like(last) + now, mask=routed)
    count_ptr = place_ptr + tl.where(hit, 4, 5) * pages
    tl.store(count_ptr, tl.load(count_ptr, mask=routed, other=0) + 1, mask=routed)
    if HOSTS:
        hosted = _hosted(missing, missing_count, worth, e, share_ptr, routed_ptr + 6)
        tl.store(mark_ptr + e, hosted.to(tl.int64))
        count_ptr = place_ptr + 6 * pages
        tl.store(count_ptr, tl.load(count_ptr, mask=hosted, other=0) + 1, mask=hosted)
        tl.debug_barrier()
        for at in range(0, P, IDS):
            i = at + tl.arange(0, IDS)
            id = tl.load(id_ptr + i, mask=i < P, other=-1)
            known = (id >= 0) & (id < experts)
            mark = tl.load(mark_ptr + id, mask=known, other=0)
            tl.store(kept_ptr + i, tl.where(mark != 0, -1, id).to(id.dtype), mask=i < P)
        missing = missing & (hosted == 0)
        missing_count -= tl.sum(hosted.to(tl.int64))
    where_ptr = slot_ptr + 2 * all_slots + first_slot
    tl.store(address_ptr + e, tl.load(where_ptr + place, mask=hit, other=0), mask=hit)
    tl.store(fetch_ptr, missing_count * PLANES)
    tl.store(clock_ptr + 1, lease)
    tl.store(clock_ptr, now, mask=tl.max(routed.to(tl.int32)) > 0)

    _count_routed(routed_ptr, routed, before, lease, named, SCAN)

    if missing_count > 0:
        s = tl.arange(0, SLOTS).to(tl.int64)
        label_ptr = slot_ptr + first_slot + s
        label = tl.load(label_ptr, mask=s < slots, other=-1)
        queue = tl.load(label_ptr + all_slots, mask=s < slots, other=0)
        busy = tl.load(lease_ptr + label, mask=label >= 0, other=0) == lease
        # pages taken by this lease may have their new score already: they are busy
        since = tl.load(page_ptr + 2 * pages + label, mask=label >= 0, other=0)
        value = _value(tl.load(page_ptr + pages + label, mask=label >= 0, other=0), since, now, epoch)
        key = value * _AGES - tl.minimum(now - since, _AGES - 1)
        used, oldest, newest = tl.load(clock_ptr + 2), tl.load(clock_ptr + 3), tl.load(clock_ptr + 4)
        limit, window = tl.load(clock_ptr + 5), tl.load(clock_ptr + 6)
        waiting = tl.sum((queue != 0).to(tl.int64))
        expert = _least(e, missing)
        for i in range(missing_count):
            if used < limit:
                slot = used
                used += 1
            else:
                # W, the oldest of the window, and M, the minimum of the main part
                evictable = (s < limit) & (busy == 0)
                w_place = _least(queue, evictable & (queue != 0))
                w_key = _least(key, queue == w_place)
                in_main = evictable & (queue == 0)
                m_key = _least(key, in_main)
                m_page = _least(label, in_main & (key == m_key))
                from_main = (m_key < w_key) & (m_key != _NONE)
                chosen = tl.where(from_main, label == m_page, queue == w_place)
                slot = _least(s, chosen & (s < limit))
                waiting -= tl.where(from_main, 0, 1)
                tl.store(page_ptr + _least(label, s == slot), -1)
            here = s == slot
            label = tl.where(here, first_page + expert, label)
            if SCAN:
                queue = tl.where(here, oldest, queue)
                oldest -= 1
            else:
                queue = tl.where(here, newest, queue)
                newest += 1
            busy = busy | here
            waiting += 1
            if waiting > window:
                promoted = _least(queue, (queue != 0) & (here == 0))
                queue = tl.where(queue == promoted, 0, queue)
                waiting -= 1
            address = tl.load(where_ptr + slot)
            tl.store(page_ptr + first_page + expert, slot)
            tl.store(address_ptr + expert, address)
            for plane in tl.static_range(PLANES):
                entry_ptr = fetch_ptr + 1 + i * PLANES + plane
                own_ptr = source_ptr + 2 * plane * pages + first_page + expert
                tl.store(entry_ptr, tl.load(own_ptr))
                tl.store(entry_ptr + PLANES * EXPERTS, address + plane * second_at)
                tl.store(entry_ptr + 2 * PLANES * EXPERTS, tl.load(own_ptr + pages))
            expert = _least(e, missing & (e > expert))
        tl.store(label_ptr, label, mask=s < slots)
        tl.store(label_ptr + all_slots, queue, mask=s < slots)
        tl.store(clock_ptr + 2, used)
        tl.store(clock_ptr + 3, oldest)
        tl.store(clock_ptr + 4, newest)
