"""The policies that a config names are those that can be made."""

import pytest

from vbrt.config import POLICIES
from vbrt.residency.simulate import make_policy
from vbrt.residency.user_policy import check_policy


@pytest.mark.parametrize("kind", [kind for kind in POLICIES if kind != "auto"])
def test_every_policy_of_the_config_can_be_made_and_keeps_to_the_protocol(kind):
    policy = check_policy(make_policy(kind, 4096, prefetch=1, group=2))
    assert (policy.kind, policy.capacity_bytes) == (kind, 4096)
