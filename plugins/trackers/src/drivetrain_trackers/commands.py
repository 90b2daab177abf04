"""``drivetrain plot``. matplotlib is imported when it runs; torch is not."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(context_settings={"token_normalize_func": lambda name: name.replace("-", "_")})
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    default="curves.png",
    show_default=True,
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The picture: .png or .svg.",
)
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="A value to draw, instead of all; repeatable.")
@click.option(
    "--over",
    type=click.Choice(["step", "time"]),
    default="step",
    show_default=True,
    help="The horizontal axis; time is in minutes since a run's first value.",
)
@click.option(
    "--scale",
    type=click.Choice(["auto", "linear", "log"]),
    default="auto",
    show_default=True,
    help="The vertical axes; auto is log where values span a factor of 100 and none is negative.",
)
@click.option("--smooth", type=click.IntRange(1), default=1, metavar="N", help="Draw means over N neighbouring values.")
def plot(runs: tuple[Path, ...], output: Path, metrics: tuple[str, ...], over: str, scale: str, smooth: int) -> None:
    """Draw what runs logged, side by side: losses, metrics, rates, steps per second.

    RUNS are folders in which a tracker wrote metrics.jsonl or TensorBoard's files, or folders with such folders at any
    depth: `drivetrain plot runs` compares all of them. A run's first value that is not finite is marked.
    """
    from drivetrain_trackers.curves import read_runs
    from drivetrain_trackers.picture import write

    found = read_runs(runs)
    drawn = write(found, output, metrics=metrics, over=over, scale=scale, smooth=smooth)
    click.echo(f"{output}: {', '.join(drawn)} of {len(found)} run{'s' if len(found) > 1 else ''}")
    for run in found:
        click.echo(f"  {run.name}: {run.path}")
