"""``drivetrain checkpoint``: look into a checkpoint, give its model to other programs, take over other libraries'."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from drivetrain.cli.options import normalise

if TYPE_CHECKING:
    from drivetrain.checkpoint.inspection import Inspection

_UNITS = ("B", "kB", "MB", "GB", "TB")


@click.group(context_settings={"token_normalize_func": normalise})
def checkpoint() -> None:
    """Look into a checkpoint, export its model, convert from and to other libraries' formats."""


@checkpoint.command(short_help="Print what a checkpoint holds and whether it is whole.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
def inspect(path: Path, as_json: bool) -> None:
    """Print what a checkpoint holds and whether it is whole; every file is checked.

    Ends with 1 when it is damaged.
    """
    from drivetrain.checkpoint.inspection import inspect as look

    found = look(path)
    click.echo(json.dumps(to_dict(found), indent=2) if as_json else "\n".join(lines(found)))
    sys.exit(1 if found.problems else 0)


@checkpoint.command(short_help="Write a checkpoint's model as safetensors.")
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--max_shard_size", default="10GB", show_default=True, metavar="SIZE", help="Largest file.")
@click.option("--model", "index", default=0, show_default=True, metavar="INDEX", help="Which of the run's models.")
def export(path: Path, out: Path, max_shard_size: str, index: int) -> None:
    """Write a checkpoint's model as safetensors that Transformers and plain torch load."""
    from drivetrain.checkpoint.export import export_checkpoint

    for file in export_checkpoint(path, out, max_shard_size=max_shard_size, index=index):
        click.echo(file)


@checkpoint.command(short_help="Write another library's checkpoint as ours, or ours as another's.")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "kind",
    default="auto",
    show_default=True,
    metavar="FORMAT",
    help="The library that wrote it: auto, accelerate, torch, fabric, or a plugin's format.",
)
@click.option(
    "--parameters",
    type=click.File(encoding="utf-8"),
    metavar="FILE",
    help="Names from model.named_parameters(), one a line: safetensors do not keep their order, an optimizer needs it.",
)
@click.option("--to", "target", metavar="FORMAT", help="The other way: write one of ours in a plugin's format.")
@click.option("--set", "options", multiple=True, metavar="KEY=VALUE", help="With --to: an option of that format.")
@click.option("--model", "index", default=0, show_default=True, metavar="INDEX", help="With --to: which of the models.")
def convert(
    source: Path,
    out: Path,
    kind: str,
    parameters: IO[str] | None,
    target: str | None,
    options: tuple[str, ...],
    index: int,
) -> None:
    """Write another library's checkpoint as one of ours, or ours as another's; say what could not be carried over.

    Reads save_state folders of Accelerate (FSDP's too, full or sharded), files of torch.save and safetensors, what
    Lightning Fabric saves, and the formats of installed plugins. Nothing in them is executed: pickles are read as
    weights only.
    """
    if target is not None:
        _write(source, out, target, options, index)
        return
    if options:
        raise click.UsageError("--set belongs to --to.")
    from drivetrain.checkpoint.converting import convert as work

    names = [] if parameters is None else parameters.read().split()
    done = work(source, out, kind, parameters=names)
    click.echo(f"{done.path}: from {done.kind}")
    for sentence in done.carried:
        click.echo(f"  carried: {sentence}")
    for sentence in done.left_out:
        click.echo(f"  left out: {sentence}")


def _write(source: Path, out: Path, target: str, options: tuple[str, ...], index: int) -> None:
    from drivetrain.checkpoint.formats import convert_to

    pairs = [option.partition("=") for option in options]
    wrong = [key for key, equals, _ in pairs if not equals]
    if wrong:
        raise click.UsageError(f"--set takes KEY=VALUE, not {wrong[0]!r}.")
    left_out = convert_to(source, out, target, {key: value for key, _, value in pairs}, index=index)
    click.echo(f"{out}: written as {target}")
    for sentence in left_out:
        click.echo(f"  left out: {sentence}")


def to_dict(found: Inspection) -> dict[str, Any]:
    """Return everything as JSON knows it."""
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
        "tensors": {name: entry.plain() for name, entry in manifest.tensors.items()},
        "files": {name: dataclasses.asdict(entry) for name, entry in manifest.files.items()},
    }


def lines(found: Inspection) -> list[str]:
    """Return what a reader wants to know, the health last."""
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
