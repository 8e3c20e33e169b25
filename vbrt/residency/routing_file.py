"""File format of recorded expert routing: a magic line, a JSON line with the layers, three columns of varints.

    vbrt-routing 1
    {"layers": [{"name": "model.layers.0.mlp.experts", "experts": 128, "top_k": 8, "page_bytes": {"coarse": 2654208}}]}
    three zlib streams

Numbers are LEB128 varints. The columns, concatenated:

    steps   per pass: 0, number of its phase; if that is new, length of its name and the UTF-8 bytes
            per layer: 1 + its number, number of tokens
    again   per token: bit mask of reused experts: bit n for the n-th expert of the layer's previous token
    gaps    per token: number of other experts, and the gaps between their ids

A token of Qwen3-30B-A3B's 48 layers takes about 250 bytes.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from vbrt.errors import ArgumentError, describe_os_error
from vbrt.host.safe_files import check_writable, expanded, read_bounded, write_file
from vbrt.residency.access_trace import Pass
from vbrt.residency.routing_trace import Routed, RoutedLayer, Routing

__all__ = ["VERSION", "check_routing_path", "read_routing", "write_routing"]

VERSION = 1
_MAGIC = b"vbrt-routing "
_COLUMNS = 3
_MOST_BYTES = 1 << 30  # per column: a small file may decompress to any size


def check_routing_path(path: str | os.PathLike[str]) -> Path:
    """Return the expanded path of a routing file, if it can be written.

    Raises:
        ArgumentError: it cannot be written.
    """
    try:
        target = expanded(path)
        check_writable(target)
    except OSError as error:
        raise _unwritable(path, error) from error
    return target


def write_routing(routing: Routing, path: str | os.PathLike[str]) -> None:
    """Write a routing file; replace an existing one atomically.

    Raises:
        ArgumentError: it cannot be written.
    """
    layers = [
        {"name": each.name, "experts": each.experts, "top_k": each.top_k, "page_bytes": dict(each.page_bytes)}
        for each in routing.layers
    ]
    head = _MAGIC + str(VERSION).encode() + b"\n" + json.dumps({"layers": layers}).encode() + b"\n"
    data = head + b"".join(zlib.compress(column, 9) for column in _packed(routing))
    try:
        write_file(expanded(path), data)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str | os.PathLike[str], error: OSError) -> ArgumentError:
    return ArgumentError(
        f"{path}: cannot write the routing: {describe_os_error(error)}; name a file in a directory that is "
        "there and can be written"
    )


def read_routing(path: str | os.PathLike[str]) -> Routing:
    """Read a file of `vb.record_routing` or `write_routing`.

    Raises:
        ArgumentError: it cannot be read, is not such a file or one of a newer version, or is damaged.
    """
    try:
        path = expanded(path)
        data = read_bounded(path, _MOST_BYTES)
    except OSError as error:
        raise ArgumentError(f"{path}: cannot read the routing: {describe_os_error(error)}") from error
    magic, _, rest = data.partition(b"\n")
    if not magic.startswith(_MAGIC):
        raise ArgumentError(f"{path}: not a file of recorded routing; expected one that vb.record_routing has written")
    if magic != _MAGIC + str(VERSION).encode():
        version = magic.removeprefix(_MAGIC).decode(errors="replace")
        raise ArgumentError(f"{path}: recorded routing of version {version:.20}; this vbrt reads version {VERSION}")
    head, _, body = rest.partition(b"\n")
    try:
        layers = tuple(_layer(each) for each in json.loads(head)["layers"])
        return Routing(layers, tuple(_unpacked(_inflated(body), layers)))
    except (ValueError, KeyError, TypeError, IndexError, zlib.error) as error:
        raise ArgumentError(f"{path}: damaged ({error}); record the routing again") from error


def _layer(fields: dict) -> RoutedLayer:
    name, experts, top_k, page_bytes = (fields[key] for key in ("name", "experts", "top_k", "page_bytes"))
    numbers = [experts, top_k, *page_bytes.values()]
    if not isinstance(name, str) or not page_bytes or any(type(n) is not int or n < 1 for n in numbers):
        raise ValueError(f"a layer {str(fields)[:80]}")
    return RoutedLayer(name, experts, top_k, page_bytes)


def _inflated(body: bytes) -> list[bytes]:
    columns = []
    for _ in range(_COLUMNS):
        unpacker = zlib.decompressobj()
        columns.append(unpacker.decompress(body, _MOST_BYTES))
        if not unpacker.eof:
            raise ValueError("the records end early")
        body = unpacker.unused_data
    if body:
        raise ValueError("the file goes on behind its end")
    return columns


def _packed(routing: Routing) -> list[bytes]:
    columns = steps, again, gaps = bytearray(), bytearray(), bytearray()
    phases, before = {}, {}
    for record in routing.records:
        if isinstance(record, Pass):
            _put(steps, 0, phases.get(record.phase, len(phases)))
            if record.phase not in phases:
                phases[record.phase] = len(phases)
                name = record.phase.encode()
                _put(steps, len(name), *name)
            continue
        _put(steps, 1 + record.layer, len(record.tokens))
        for token in record.tokens:
            last, before[record.layer] = before.get(record.layer, ()), token
            others = [expert for expert in token if expert not in last]
            _put(again, sum(1 << n for n, expert in enumerate(last) if expert in token))
            _put(gaps, len(others), *(high - low for low, high in zip((0, *others), others, strict=False)))
    return [bytes(column) for column in columns]


def _put(out: bytearray, *numbers: int) -> None:
    """Append varints."""
    for number in numbers:
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)


def _numbers(data: bytes) -> Iterator[int]:
    """Yield the varints of a column. Raises ValueError: the last one is incomplete."""
    number = shift = 0
    for byte in data:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield number
            number = shift = 0
    if shift:
        raise ValueError("the records end in the middle of a number")


def _unpacked(columns: list[bytes], layers: tuple[RoutedLayer, ...]) -> Iterator[Pass | Routed]:
    steps, again, gaps = map(_numbers, columns)
    take, phases, last = steps.__next__, [], [()] * len(layers)
    try:
        for kind in steps:
            if kind:
                layer, tokens = layers[kind - 1], []
                for _ in range(take()):
                    last[kind - 1] = _token(next(again), gaps.__next__, layer, last[kind - 1])
                    tokens.append(last[kind - 1])
                yield Routed(kind - 1, tuple(tokens))
                continue
            number = take()
            if number == len(phases):
                phases.append(bytes([take() for _ in range(take())]).decode())
            yield Pass(phases[number])
    except (StopIteration, RuntimeError):
        raise ValueError("the records end early") from None


def _token(again: int, take: Callable[[], int], layer: RoutedLayer, last: tuple[int, ...]) -> tuple[int, ...]:
    found, expert = [one for n, one in enumerate(last) if again >> n & 1], 0
    for _ in range(take()):
        expert += take()
        found.append(expert)
    if expert >= layer.experts:
        raise ValueError(f"expert {expert} of {layer.name}, which has {layer.experts}")
    return tuple(sorted(found))
