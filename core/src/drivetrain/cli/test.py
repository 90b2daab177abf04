"""``drivetrain test``: runs a short distributed job that checks its own results."""

from __future__ import annotations

import sys
from typing import Any

import click

from drivetrain.cli.options import chosen_file, configuration_options, normalise, resolve

SELF_TEST = "drivetrain.cli.self_test"


@click.command(context_settings={"token_normalize_func": normalise})
@configuration_options
def test(config_file: str | None, settings: tuple[str, ...], **flags: Any) -> None:
    """Run a short distributed job and check gather, gradients, saving and loading against one plain process.

    Without a number of processes it takes one per accelerator, or two on the CPU.
    """
    config_file, remark = chosen_file(config_file)
    if remark:
        click.echo(remark, err=True)
    resolved = resolve(config_file, settings, flags)
    from drivetrain.launch import script
    from drivetrain.launch.plan import count_devices, describe, make_plan, trains_over

    if resolved.config.num_processes is None:
        plan = make_plan(resolved)
        on_cpu = resolved.config.use_cpu or plan.on_cpu or not count_devices()
        here = 2 if on_cpu and not plan.numbered_by else plan.processes_here
        world = here * plan.num_machines
        if not trains_over(resolved.config.distributed_type, world):
            click.echo(f"no backend that may be taken trains over {world} processes; testing one", err=True)
            world = 1
        if world != plan.world_size:
            resolved = resolve(config_file, settings, {**flags, "num_processes": str(world)})
    plan = make_plan(resolved)
    click.echo(describe(plan, resolved), err=True)
    code = script.launch(resolved, [SELF_TEST], module=True, plan=plan)
    if code == 0:
        click.echo("Everything works.")
    sys.exit(code)
