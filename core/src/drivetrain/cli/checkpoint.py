"""``drivetrain checkpoint``: inspects and exports checkpoints, and converts those of other libraries."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from drivetrain.cli.options import check_installed, normalise

if TYPE_CHECKING:
    from drivetrain.checkpoint import Inspection

_UNITS = ("B", "kB", "MB", "GB", "TB")


class _Commands(click.Group):
    """Takes ``convert`` from the distribution that brings it, where that is installed."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "convert" and find_spec("drivetrain_convert") is not None:
            command: click.Command = import_module("drivetrain_convert.command").convert
            return command
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Commands, context_settings={"token_normalize_func": normalise})
def checkpoint() -> None:
    """Look into a checkpoint, export its model, convert from and to other libraries' formats."""


@checkpoint.command(
    short_help="Convert from and to other libraries' checkpoints; needs drivetrain-convert.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def convert(**_: Any) -> None:
    """Convert from and to other libraries' checkpoints: the distribution drivetrain-convert, which is not installed."""
    check_installed("convert", "reading and writing checkpoints of other libraries")


@checkpoint.command(short_help="Print what a checkpoint holds and whether it is whole.")
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
def inspect(path: str, as_json: bool) -> None:
    """Print what a checkpoint holds and whether it is whole; every file is checked.

    PATH is a folder, or an address such as s3://bucket/run, which is read over the network.

    Ends with 1 when it is damaged.
    """
    from drivetrain.checkpoint import inspect as look

    found = look(path)
    click.echo(json.dumps(to_dict(found), indent=2) if as_json else "\n".join(lines(found)))
    sys.exit(1 if found.problems else 0)


@checkpoint.command(short_help="Write a checkpoint's model as safetensors.")
@click.argument("path")
@click.argument("out")
@click.option("--max_shard_size", default="10GB", show_default=True, metavar="SIZE", help="Largest file.")
@click.option("--model", "index", default=0, show_default=True, metavar="INDEX", help="Which of the run's models.")
def export(path: str, out: str, max_shard_size: str, index: int) -> None:
    """Write a checkpoint's model as safetensors that Transformers and plain torch load.

    PATH is a folder, or an address such as s3://bucket/run. OUT is a folder of this machine.
    """
    from drivetrain.checkpoint import export_checkpoint

    for file in export_checkpoint(path, out, max_shard_size=max_shard_size, index=index):
        click.echo(file)


def to_dict(found: Inspection) -> dict[str, Any]:
    """Return the report for JSON output."""
    manifest = found.manifest
    return {
        "path": str(found.path),
        "whole": not found.problems,
        "problems": list(found.problems),
        "num_bytes": found.num_bytes,
        **{
            field.name: getattr(manifest, field.name)
            for field in dataclasses.fields(manifest)
            if field.name not in ("tensors", "files")
        },
        "tensors": manifest.plain_tensors(),
        "files": {name: dataclasses.asdict(entry) for name, entry in manifest.files.items()},
    }


def lines(found: Inspection) -> list[str]:
    """Return the report as lines of text, problems last."""
    manifest = found.manifest
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created))
    mesh = ", ".join(f"{axis} {size}" for axis, size in manifest.mesh.items() if size > 1)
    rows = [
        ("written", f"{when} by {manifest.backend} on {manifest.world_size} process(es){f' ({mesh})' if mesh else ''}"),
        ("with", ", ".join(f"{name} {version}" for name, version in manifest.libraries.items())),
        ("counters", json.dumps(manifest.counters)),
        ("info", json.dumps(manifest.info)),
        ("objects", ", ".join(manifest.objects) or "none"),
        ("random state", f"of {len(manifest.rng)} data-parallel process(es)" if manifest.rng else "none"),
    ]
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name, entry in manifest.tensors.items():
        kind = name.partition(".")[0]
        counts[kind] += 1
        sizes[kind] += entry.num_bytes
    rows += [(kind, f"{counts[kind]} tensors, {size(sizes[kind])}") for kind in sorted(counts)]
    for index, trainable in enumerate(manifest.trainables):
        groups = [len(group["params"]) for optimizer in trainable["optimizers"] for group in optimizer]
        if groups:
            rows.append((f"groups of {index}", f"{len(groups)} with {', '.join(map(str, groups))} parameters"))
    rows.append(("files", f"{len(manifest.files)}, {size(found.num_bytes)}"))
    width = max(len(word) for word, _ in rows)
    text = [str(found.path), *(f"  {word:<{width}}  {value}" for word, value in rows)]
    if not found.problems:
        return [*text, "whole: every file has the size and checksum that the manifest says"]
    return [*text, *(f"damaged: {problem}" for problem in found.problems)]


def size(num_bytes: float) -> str:
    """Return ``"1.5 MB"`` for 1,500,000."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1000, unit + 1
    return f"{num_bytes:.3g} {_UNITS[unit]}"
