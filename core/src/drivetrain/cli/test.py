"""``drivetrain test``: runs a short distributed job that checks its own results."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.cli.options import chosen_file, configuration_options, normalise, resolve

if TYPE_CHECKING:
    from drivetrain.config import ResolvedConfig

SELF_TEST = "drivetrain.cli.self_test"


@click.command(context_settings={"token_normalize_func": normalise})
@configuration_options
@click.option(
    "--plot",
    "picture",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw which samples each rank reads and what it holds: .png or .svg.",
)
def test(config_file: str | None, settings: tuple[str, ...], picture: Path | None, **flags: Any) -> None:
    """Run a short distributed job and check gather, gradients, saving and loading against one plain process.

    Without a number of processes it takes one per accelerator, or two on the CPU. It trains a small model of its own:
    settings that name parts of yours, such as fsdp.transformer_layer_cls, are left out. --plot trains another one of
    some megabytes, and draws for each rank the samples that it reads, as the section dataloader shares them out, and
    what it holds of parameters, gradients and optimizer states.
    """
    if picture is not None:
        from drivetrain import pictures
        from drivetrain.registry import pip_line

        pictures.check(picture, pip_line("plot"))
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
    resolved, dropped = without_the_model(resolved)
    if dropped:
        click.echo(f"left out, since they are about another model: {', '.join(dropped)}", err=True)
    plan = make_plan(resolved)
    click.echo(describe(plan, resolved), err=True)
    arguments = [] if picture is None else [str(picture.absolute())]
    code = script.launch(resolved, [SELF_TEST, *arguments], module=True, plan=plan)
    if code == 0:
        click.echo("Everything works." if picture is None else f"Everything works. The picture: {picture}")
    sys.exit(code)


def without_the_model(resolved: ResolvedConfig) -> tuple[ResolvedConfig, list[str]]:
    """Leave out what the sections of backends say about the model that a script trains, and the check of its plan.

    Args:
        resolved: the configuration of the script. Of a section's model, fields with ``json_schema_extra={"of_model":
            True}`` are about the model.

    Returns:
        The configuration without them, and their keys, such as ``fsdp.transformer_layer_cls``.
    """
    from drivetrain.config.locate import Origin
    from drivetrain.registry import get_registry

    registry = get_registry()
    sections: dict[str, dict[str, Any]] = {}
    dropped: list[str] = []
    for name, section in resolved.sections.items():
        kind = registry.load_section(registry.info(name))
        fields = {} if kind is None else kind.model_fields
        extras = {key: field.json_schema_extra for key, field in fields.items()}
        about = [key for key in section if isinstance(extra := extras.get(key), dict) and extra.get("of_model")]
        sections[name] = {key: value for key, value in section.items() if key not in about}
        dropped += [f"{name}.{key}" for key in about]
    config = resolved.config
    if config.plan.check:
        config = config.model_copy(update={"plan": config.plan.model_copy(update={"check": False})})
        dropped.append("plan.check")
    # Workers let the environment set what no flag did.
    settled = dict.fromkeys(dropped, Origin("flag", "drivetrain test"))
    return replace(resolved, config=config, sections=sections, origins={**resolved.origins, **settled}), dropped
