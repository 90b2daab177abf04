"""``drivetrain diloco``: what a run would send, before it runs."""

from __future__ import annotations

import json

import click


@click.group()
def diloco() -> None:
    """Plan runs of the backend diloco."""


@diloco.command()
@click.option("--parameters", type=float, required=True, help="Parameters of the model: 7e9.")
@click.option("--workers", type=click.IntRange(2), required=True, help="Workers that train it.")
@click.option("--steps", type=click.IntRange(1), default=10000, show_default=True, help="Optimizer steps of the run.")
@click.option("--local_steps", type=click.IntRange(1), default=500, show_default=True, help="Steps of a round.")
@click.option("--bandwidth", type=float, default=1.0, show_default=True, help="Between workers, in Gbit/s.")
@click.option("--step_seconds", type=float, default=1.0, show_default=True, help="Of a step that sends nothing.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def traffic(
    parameters: float,
    workers: int,
    steps: int,
    local_steps: int,
    bandwidth: float,
    step_seconds: float,
    as_json: bool,
) -> None:
    """Print what a worker sends and how long a run takes, beside reducing gradients in every step."""
    from drivetrain_diloco.traffic import Traffic

    rows = Traffic(parameters, workers, steps, local_steps, bandwidth * 1e9 / 8, step_seconds).rows()
    if as_json:
        click.echo(json.dumps([{"way": name, "bytes": sent, "seconds": took} for name, sent, took in rows]))
        return
    click.echo(f"{'communicates':<16} {'sent by a worker':>18} {'run':>12}")
    for name, sent, took in rows:
        click.echo(f"{name:<16} {sent / 1e9:>15,.1f} GB {took / 3600:>10,.1f} h")
