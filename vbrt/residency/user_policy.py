"""User-defined policies: protocol check before a model is changed, and validation of every decision.

vbrt.wrap(model, policy=MyPolicy(0))      # an object: each tier gets a copy of it, resized to the tier's room
vbrt.wrap(model, policy=MyPolicy)         # or a factory, called once for each tier with its room in bytes
"""

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from vbrt.config import PolicyConfig
from vbrt.config.overrides import OtherSections, PolicyOverrides
from vbrt.errors import ConfigError, TierError
from vbrt.residency.policy import FORWARD, Decision, Policy

__all__ = ["CheckedPolicy", "Overrides", "PolicyFactory", "check_policy", "policy_factory", "take_policy"]

PolicyFactory = Callable[[int], Policy]
"""Factory of a tier's policy, from its room in bytes."""


class Overrides(OtherSections, total=False):
    """Type of keyword overrides where `policy` may also be a policy or its factory."""

    policy: PolicyOverrides | PolicyConfig | Policy | PolicyFactory


_METHODS = {name: member for name, member in vars(Policy).items() if inspect.isfunction(member) and name[0] != "_"}
_ATTRIBUTES = ("kind", "capacity_bytes", "prefetch")
_SECTION = (Mapping, str, int, float, list, tuple, type(None))  # other forms of the config's section


def take_policy(overrides: dict[str, Any], section: type) -> Any:
    """Remove `policy` from the overrides of a config and return it if it is a policy or a factory, else None.

    Args:
        overrides: as `vbrt.wrap` takes them; changed.
        section: the class of the config's section.
    """
    given = overrides.get("policy")
    return None if isinstance(given, (*_SECTION, section)) else overrides.pop("policy")


def policy_factory(given: Any) -> PolicyFactory:
    """Return the factory of checked policies for a user's policy object or factory.

    Raises:
        ConfigError: the object lacks a member of the protocol, which the message names.
    """
    if callable(given) and (isinstance(given, type) or not hasattr(given, "access")):
        return lambda capacity_bytes: CheckedPolicy(check_policy(given(capacity_bytes)), capacity_bytes)
    check_policy(given)
    return lambda capacity_bytes: CheckedPolicy(copy.deepcopy(given), capacity_bytes)


def check_policy(policy: Any) -> Policy:
    """Return the policy if it satisfies the protocol.

    Raises:
        ConfigError: it lacks a method or attribute of `Policy`, or a method does not take what the stack passes.
    """
    name = f"policy {type(policy).__name__}"
    methods = [f"{method}{_signature(function)}" for method, function in _METHODS.items()]
    needs = f"a policy has {', '.join(methods)}; and {', '.join(_ATTRIBUTES)} (see vbrt.residency.policy.Policy)"
    for method, function in _METHODS.items():
        own = getattr(policy, method, None)
        if not callable(own):
            raise ConfigError(f"{name}: it has no method {method}{_signature(function)}; {needs}")
        names = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
        try:
            inspect.signature(own).bind(*names)
        except TypeError as error:
            raise ConfigError(f"{name}: its {method}{inspect.signature(own)} cannot take ({error}); {needs}") from None
    for attribute in _ATTRIBUTES:
        value = getattr(policy, attribute, None)
        if not isinstance(value, str if attribute == "kind" else int):
            raise ConfigError(f"{name}: its {attribute} is {value!r:.80}; {needs}")
    return policy


def _signature(function: Callable) -> str:
    return f"({', '.join(name for name in inspect.signature(function).parameters if name != 'self')})"


class CheckedPolicy:
    """Proxy of a user's policy that rejects decisions which would corrupt a tier's accounting.

    Attributes:
        policy: the user's.
    """

    def __init__(self, policy: Policy, capacity_bytes: int) -> None:
        self.policy = policy
        self._charges: dict[str, int] = {}  # of resident pages
        self._sizes: dict[str, int] = {}  # of pages that were accessed
        self._taken = 0  # sum of the charges
        policy.reset()
        self.resize(capacity_bytes)

    @property
    def kind(self) -> str:
        """The policy's name."""
        return self.policy.kind

    @property
    def capacity_bytes(self) -> int:
        """The policy's room."""
        return self.policy.capacity_bytes

    @property
    def prefetch(self) -> int:
        """Most pages prefetched."""
        return self.policy.prefetch

    def reset(self) -> None:
        """See `Policy.reset`."""
        self._charges.clear()
        self._taken = 0
        self.policy.reset()

    def begin_pass(self, phase: str = FORWARD) -> None:
        """See `Policy.begin_pass`."""
        self.policy.begin_pass(phase)

    @property
    def announce(self) -> Callable[[Mapping[str, int]], None] | None:
        """The policy's method, if it has one; see `vbrt.residency.policy`."""
        return self._announce if hasattr(self.policy, "announce") else None

    def _announce(self, pages: Mapping[str, int]) -> None:
        self._sizes.update(pages)
        self.policy.announce(pages)

    def access(self, key: str, size: int, busy: Collection[str] = ()) -> Decision:
        """See `Policy.access`; called only if the page fits besides the busy ones."""
        decision = self.policy.access(key, size, busy)
        if decision is None:
            raise self._broken(f"access({key!r}) gave None although {size} bytes fit beside the pages in use")
        if decision.hit and key not in self._charges:
            raise self._broken(f"access({key!r}) is a hit, and the page is not resident")
        if decision.key != key:
            raise self._broken(f"access({key!r}) decided on {decision.key!r}")
        self._sizes[key] = size
        self._apply(decision, busy)
        return decision

    def ahead(self, busy: Collection[str] = ()) -> list[Decision]:
        """See `Policy.ahead`."""
        decisions = list(self.policy.ahead(busy))
        for decision in decisions:
            if decision.key in self._charges:
                raise self._broken(f"ahead() stages {decision.key!r}, which is resident")
            self._apply(decision, busy)
        return decisions

    def remove(self, key: str) -> None:
        """See `Policy.remove`."""
        self._taken -= self._charges.pop(key, 0)
        self._sizes.pop(key, None)
        self.policy.remove(key)

    def resize(self, capacity_bytes: int) -> tuple[str, ...]:
        """See `Policy.resize`."""
        victims = tuple(self.policy.resize(capacity_bytes))
        self._evict(victims, ())
        if self.policy.capacity_bytes != capacity_bytes:
            raise self._broken(f"resize({capacity_bytes}) left capacity_bytes at {self.policy.capacity_bytes}")
        self._check_room()
        return victims

    def _apply(self, decision: Decision, busy: Collection[str]) -> None:
        self._evict(decision.evict, busy)
        if decision.key not in self._charges:
            charge = max(self._sizes.get(decision.key, 0), decision.charge)
            self._charges[decision.key] = charge
            self._taken += charge
        self._check_room()

    def _evict(self, keys: Iterable[str], busy: Collection[str]) -> None:
        for key in keys:
            if key in busy:
                raise self._broken(f"it evicts {key!r}, which is in use")
            if key not in self._charges:
                raise self._broken(f"it evicts {key!r}, which is not resident")
            self._taken -= self._charges.pop(key)

    def _check_room(self) -> None:
        if self._taken > max(0, self.capacity_bytes):
            raise self._broken(f"resident pages take {self._taken} bytes of its capacity_bytes = {self.capacity_bytes}")

    def _broken(self, what: str) -> TierError:
        return TierError(f"policy {type(self.policy).__name__}: {what}; see vbrt.residency.policy.Policy")
