"""`vbrt inspect`: content of a checkpoint, and what a config makes of it, from headers alone."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vbrt.cli.open_model import add_dtype, dtype_of, settled_config
from vbrt.cli.options import add_command, add_config, add_model, config_of, integration, locate_model
from vbrt.cli.screen import add_footer, add_row, console_for_stdout, table_of, working
from vbrt.residency.plan import format_bytes

if TYPE_CHECKING:
    from vbrt.saves.convert.inspection import Inspection

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add `vbrt inspect` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "inspect",
        _inspect,
        help="describe a checkpoint, and what a config makes of it",
        text="Only\nheaders are read. Exits with 1 if vbrt cannot load it.",
        examples="  vbrt inspect ./Llama-3.1-8B\n  vbrt inspect ./Llama-3.1-8B-Q4_0.gguf\n"
        "  vbrt inspect ./Qwen3-30B-A3B --config exact --json\n",
    )
    add_model(parser, "a directory with config and safetensors files, a GGUF file")
    add_config(parser)
    add_dtype(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")


def _inspect(args: argparse.Namespace) -> int:
    config_of(args)  # report its errors before any slow work
    locate_model(args, "headers")
    with working("importing torch and transformers") as say:
        hf_configs = integration("hf_configs")
        from vbrt.saves.convert.inspection import inspect
        from vbrt.saves.load.sources import open_source

        say(f"reading {args.model}")
        model = hf_configs.meta_model(args.model, dtype_of(args))
        source = open_source(args.model)
        config = source.config(settled_config(args), {})
        found = inspect(source, model, config)
    head = {
        "model": type(model).__name__,
        "model_type": model.config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    if args.json:
        print(json.dumps({**head, "config": config.to_dict(), **found.to_dict()}, indent=2))
    else:
        _print(console_for_stdout(), head, config.source, found)
    return 1 if found.refusal else 0


def _print(console: Console, head: dict[str, Any], config: str, found: "Inspection") -> None:
    dtypes = ", ".join(f"{format_bytes(nbytes)} {dtype}" for dtype, nbytes in found.dtypes.items())
    console.print(f"{head['model']} ({head['model_type']}), {head['parameters'] / 1e6:,.1f} million parameters")
    files = "1 file" if found.files == 1 else f"{found.files} files"
    console.print(
        f"{found.layout}: {files}, {found.tensors} tensors, {format_bytes(found.nbytes)}: {dtypes}", soft_wrap=True
    )
    if any(kind.becomes != "dense" for kind in found.weights):
        console.print()
        table = table_of("in the files", ">tensors", ">bytes", "becomes", "why")
        for kind in found.weights:
            add_row(table, kind.layout, str(kind.count), format_bytes(kind.nbytes), kind.becomes, kind.why)
        console.print(table)
    if found.refusal:
        console.print(f"\nvbrt cannot load it: {found.refusal}", style="red", soft_wrap=True)
        return
    if found.layers:
        console.print()
        _print_layers(console, config, found)
    if found.stays:
        console.print()
        table = table_of("stays as it is", ">modules", ">bytes", "why")
        for stays in found.stays:
            more = f" and {stays.modules - 1} more" if stays.modules > 1 else ""
            add_row(table, stays.example + more, str(stays.modules), format_bytes(stays.nbytes), stays.reason)
        console.print(table)
    for note in found.notes:
        console.print(f"note: {note}")


def _print_layers(console: Console, config: str, found: "Inspection") -> None:
    table = table_of(f"under {config}", ">layers", ">experts", "is", ">bytes", "becomes", ">at most", "bits")
    for layer in found.layers:
        add_row(
            table,
            layer.kind,
            str(layer.layers),
            str(layer.experts or ""),
            layer.dtype,
            format_bytes(layer.dense_bytes),
            layer.becomes,
            format_bytes(layer.page_bytes),
            "as published" if layer.published else "all" if layer.lossless else "rounded",
        )
    dense, pages = sum(x.dense_bytes for x in found.layers), sum(x.page_bytes for x in found.layers)
    add_footer(
        table,
        "total",
        str(sum(x.layers for x in found.layers)),
        "",
        "",
        format_bytes(dense),
        "",
        format_bytes(pages),
        "",
    )
    console.print(table)
