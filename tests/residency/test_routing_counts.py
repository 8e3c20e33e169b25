"""What is counted of routed experts, pass by pass."""

from vbrt.residency.access_counts import RoutingCounts


def test_reuse_is_counted_from_one_decode_pass_to_the_next():
    counts = RoutingCounts(8)
    counts.decode([0, 1], 1)
    assert (counts.compared, counts.reused) == (0, 0)
    counts.decode([1, 2], 1)
    counts.decode([1, 2], 1)
    counts.decode([0, 3], 1)  # 0 was touched, but not at the previous token
    assert (counts.compared, counts.reused) == (6, 3)
    assert (counts.tokens, counts.touched, counts.cached, counts.scans) == (4, 8, 4, 0)


def test_a_scan_is_no_previous_token():
    counts = RoutingCounts(4)
    counts.decode([0, 1], 1)
    counts.scan(range(4))
    counts.decode([0, 1], 1)
    assert (counts.compared, counts.reused) == (0, 0)
    counts.decode([0, 1], 1)
    assert (counts.compared, counts.reused) == (2, 2)
    assert (counts.scans, counts.cached, counts.passes) == (1, 3, 4)


def test_a_pass_without_leases_is_no_previous_token():
    counts = RoutingCounts(4)
    counts.decode([0, 1], 1)
    counts.unlease()
    counts.decode([0, 1], 1)
    assert (counts.compared, counts.unleased, counts.passes) == (0, 1, 3)
    assert counts.last == [3, 3, 0, 0]


def test_passes_that_the_device_has_counted_are_added_and_are_no_previous_token():
    counts = RoutingCounts(4)
    counts.decode([0, 1], 1)
    counts.scan_unseen()
    counts.add(2, 2, 4, compared=2, reused=1)
    counts.decode([0], 1)
    assert (counts.scans, counts.cached, counts.tokens, counts.touched) == (1, 4, 4, 7)
    assert (counts.compared, counts.reused) == (2, 1)


def test_the_last_use_of_an_expert_is_the_number_of_the_pass():
    counts = RoutingCounts(5)
    counts.scan([0, 1, 2])
    counts.decode([2, 3], 2)
    assert counts.last == [1, 1, 2, 2, 0]
