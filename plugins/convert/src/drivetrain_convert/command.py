"""The command ``drivetrain checkpoint convert``."""

from __future__ import annotations

from typing import IO

import click


@click.command(short_help="Write another library's checkpoint as ours, or ours as another's.")
@click.argument("source")
@click.argument("out")
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
    source: str,
    out: str,
    kind: str,
    parameters: IO[str] | None,
    target: str | None,
    options: tuple[str, ...],
    index: int,
) -> None:
    """Write another library's checkpoint as one of ours, or ours as another's; say what could not be carried over.

    Reads save_state folders of Accelerate (FSDP's too, full or sharded), files of torch.save and safetensors, what
    Lightning Fabric saves, and the formats of installed plugins. Nothing in them is executed: pickles are read as
    weights only. What is ours may lie at an address such as s3://bucket/run; another library's lies on this machine.
    """
    if target is not None:
        _write(source, out, target, options, index)
        return
    if options:
        raise click.UsageError("--set belongs to --to.")
    from drivetrain_convert.reading import convert as work

    names = [] if parameters is None else parameters.read().split()
    done = work(source, out, kind, parameters=names)
    click.echo(f"{done.path}: from {done.kind}")
    for sentence in done.carried:
        click.echo(f"  carried: {sentence}")
    for sentence in done.left_out:
        click.echo(f"  left out: {sentence}")


def _write(source: str, out: str, target: str, options: tuple[str, ...], index: int) -> None:
    from drivetrain_convert.writing import convert_to

    pairs = [option.partition("=") for option in options]
    wrong = [key for key, equals, _ in pairs if not equals]
    if wrong:
        raise click.UsageError(f"--set takes KEY=VALUE, not {wrong[0]!r}.")
    left_out = convert_to(source, out, target, {key: value for key, _, value in pairs}, index=index)
    click.echo(f"{out}: written as {target}")
    for sentence in left_out:
        click.echo(f"  left out: {sentence}")
