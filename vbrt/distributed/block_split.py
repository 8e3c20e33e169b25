"""Pipeline partition: consecutive blocks per device, balanced by page bytes.

Units are the blocks of the longest module list that has most of the model's bytes, and the modules next to the path to
it. Modules registered before the list go to the first device, those after it to the last; units that share a parameter
go to one device.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from vbrt.errors import WrapError

__all__ = ["part_units"]


def part_units(model: nn.Module, page_bytes: Mapping[str, int], count: int) -> list[dict[str, nn.Module]]:
    """Return the units of each of `count` devices, by their names in the model.

    Args:
        page_bytes: page bytes of swapped weights, by module name.

    Raises:
        WrapError: the model has no list of blocks, fewer blocks than devices, or blocks on two devices share a
            parameter.
    """
    where, blocks = _blocks(model)
    if len(blocks) < count:
        raise WrapError(
            f"tiers.gpu.devices: {type(model).__name__} has {len(blocks)} blocks in {where or 'no nn.ModuleList'}, "
            f"for {count} devices; name fewer, or wrap it on one"
        )
    weights = [_bytes_of(name, block, page_bytes) for name, block in blocks.items()]
    units = dict(zip(blocks, _cut(weights, count), strict=True))
    behind = False
    beside: dict[str, int] = {}
    for name, module in _beside(model, where):
        behind = behind or name == where
        if name != where:
            beside[name] = count - 1 if behind and any(True for _ in module.parameters()) else 0
    modules = dict(model.named_modules())
    _join_tied(modules, units, beside)
    placed = [{} for _ in range(count)]
    for name, at in (beside | units).items():
        placed[at][name] = modules[name]
    return placed


def _blocks(model: nn.Module) -> tuple[str, dict[str, nn.Module]]:
    """Return the longest module list with at least half of the model's bytes: its name, and its modules by name."""
    lists = {
        name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1
    }
    half = sum(p.nbytes for p in model.parameters()) / 2
    large = [name for name, blocks in lists.items() if sum(p.nbytes for p in blocks.parameters()) >= half]
    if not large:
        return "", {}
    where = max(large, key=lambda name: len(lists[name]))
    prefix = f"{where}." if where else ""
    return where, {prefix + name: block for name, block in lists[where].named_children()}


def _beside(model: nn.Module, where: str) -> list[tuple[str, nn.Module]]:
    """Return the siblings along the path to the list of blocks, and the list itself, in order of registration."""
    found = []
    for name, module in model.named_children() if where else ():
        if where == name:
            found.append((name, module))
        elif where.startswith(f"{name}."):
            found += [(f"{name}.{inner}", m) for inner, m in _beside(module, where.removeprefix(f"{name}."))]
        else:
            found.append((name, module))
    return found


def _bytes_of(name: str, block: nn.Module, page_bytes: Mapping[str, int]) -> int:
    swapped = {inner: nbytes for inner, nbytes in page_bytes.items() if inner == name or inner.startswith(f"{name}.")}
    kept = (m for inner, m in block.named_modules(prefix=name) if inner not in swapped)
    return sum(swapped.values()) + sum(p.nbytes for m in kept for p in m.parameters(recurse=False))


def _cut(weights: Sequence[int], count: int) -> list[int]:
    """Return the device of each block: consecutive, about equal bytes, at least one block per device."""
    total, done, found = sum(weights) or 1, 0, []
    for at, weight in enumerate(weights):
        wanted = min(count - 1, int((done + weight / 2) * count / total))
        last = found[-1] if found else 0
        left = len(weights) - at
        found.append(max(last, min(wanted, last + 1), count - left) if found else 0)
        done += weight
    return found


def _join_tied(modules: Mapping[str, nn.Module], blocks: Mapping[str, int], beside: dict[str, int]) -> None:
    """Move units that share a parameter to one device: the block's, or the first one's."""
    owners: dict[int, str] = {}
    for name in [*blocks, *beside]:
        for inner, parameter in modules[name].named_parameters(remove_duplicate=False):
            first = owners.setdefault(id(parameter), name)
            placed = {**blocks, **beside}
            if placed[first] == placed[name]:
                continue
            if name in blocks:
                raise WrapError(
                    f"{name}.{inner} is tied to a parameter of {first}, and the two would be on different devices; "
                    "name fewer devices, or untie them"
                )
            beside[name] = placed[first]
