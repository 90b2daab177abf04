"""``drivetrain launch``: runs a script on every process of this machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.cli.options import (
    FLAGS,
    SWITCHES,
    check_installed,
    chosen_file,
    configuration_options,
    normalise,
    resolve,
)
from drivetrain.config.keys import AUTO
from drivetrain.errors import BackendNotFoundError, UsageError

if TYPE_CHECKING:
    from drivetrain.config import ResolvedConfig
    from drivetrain.launch.dry_run import CommandLine


_HELP_ON_A_SECTION = 2
"""Words after ``launch``: the option and the section."""


GROUPS = {
    "Common": ("config_file", "distributed_type", "num_processes", "mixed_precision", "cpu", "settings", "printed"),
    "Training": ("gradient_accumulation_steps", "check_plan", "max_restarts", "debug"),
    "Accelerators": ("accelerator_ids", "device_order"),
    "Several machines": ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend"),
    "Output of the ranks": ("local_ranks_filter", "log_dir", "tee", "redirects", "role", "quiet"),
    "What SCRIPT is": ("module", "no_python", "trainer"),
    "Clusters": ("slurm", "kubernetes", "kubernetes_kind", "image"),
}
"""Options by topic, the most common first; the others follow, with ``--help``."""

EXAMPLE = """Example:
  drivetrain launch --config train.yaml train.py --epochs 3
  drivetrain launch --distributed_type fsdp --num_processes 2 --cpu train.py --epochs 3
"""


class Launch(click.Command):
    """A command that explains sections, and whose errors suggest what to write instead of another launcher's option.

    Its help shows an example, then the options in groups.
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\n{EXAMPLE}")
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        records = {each.name: record for each in options if (record := each.get_help_record(ctx))}
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([records.pop(name) for name in names])
        with formatter.section("Other"):
            formatter.write_dl(list(records.values()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if len(args) == _HELP_ON_A_SECTION and args[0] in ("-h", "--help") and not args[1].startswith("-"):
            from drivetrain.config.template import section_text
            from drivetrain.registry import get_registry

            click.echo(section_text(args[1].lower(), get_registry()), nl=False)
            click.echo("\nIn the configuration file as above, or on the command line: --set SECTION.KEY=VALUE")
            ctx.exit()
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from drivetrain.cli.other_launchers import advise

            advice = advise(error.option_name)
            if not advice:
                raise
            raise click.UsageError(f"No such option {error.option_name!r}. {advice}", ctx) from None


@click.command(
    cls=Launch,
    # Arguments after the script's name are the script's, even where they look like ours.
    context_settings={"allow_interspersed_args": False, "token_normalize_func": normalise},
    epilog="Options of the launcher go before the script, those of the script after it. `drivetrain launch -h fsdp` "
    "explains the keys of that section.",
)
@configuration_options
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as after `python -m`.")
@click.option("--no_python", is_flag=True, help="SCRIPT is a program; start it without Python in front.")
@click.option("--trainer", is_flag=True, help="Transformers' Trainer in SCRIPT is drivetrain[transformers]'s.")
@click.option("--check_plan", is_flag=True, help="Print memory and time of the first steps beside the prediction.")
@click.option("-q", "--quiet", is_flag=True, help="Do not print the lines that say what is launched and shown.")
@click.option("--print", "printed", is_flag=True, help="Show what each machine would run and with what; run nothing.")
@click.option("--slurm", metavar="FILE", help="Write a batch file for Slurm's sbatch instead of running anything.")
@click.option("--kubernetes", metavar="FILE", help="Write a manifest for Kubernetes instead of running anything.")
@click.option(
    "--kubernetes_kind",
    type=click.Choice(["JobSet", "TrainJob"]),
    default="JobSet",
    help="What --kubernetes writes; a TrainJob is for Kubeflow Trainer 2.",
)
@click.option("--image", metavar="IMAGE", help="Container image with Drivetrain and the script, for --kubernetes.")
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def launch(
    config_file: str | None,
    settings: tuple[str, ...],
    module: bool,
    no_python: bool,
    trainer: bool,
    check_plan: bool,
    quiet: bool,
    printed: bool,
    slurm: str | None,
    kubernetes: str | None,
    kubernetes_kind: str,
    image: str | None,
    script: str,
    script_args: tuple[str, ...],
    **flags: Any,
) -> None:
    """Run SCRIPT with its arguments on every process of this machine.

    One failing process stops the others; its traceback is shown once, and its exit code is the launcher's. Output of
    rank 0 is shown; of any other, what it wrote to stderr last is shown when it fails.
    """
    # What is imported here and below stays; searching it for garbage took a sixth of the start, and a third at the end.
    gc.set_threshold(100_000)
    if slurm and kubernetes:
        raise click.UsageError("--slurm and --kubernetes exclude each other: write one file at a time.")
    if bool(kubernetes) != bool(image):
        missing, given = ("--image IMAGE", "--kubernetes") if kubernetes else ("--kubernetes FILE", "--image")
        raise click.UsageError(f"{given} needs {missing}.")
    file = slurm or kubernetes
    if file:
        check_installed("clusters", "--slurm" if slurm else "--kubernetes")
    config_file, found = chosen_file(config_file)
    settings = (*settings, *("plan.check=true",) * check_plan)
    resolved = resolve(config_file, settings, flags)
    if resolved.config.distributed_type == AUTO:
        resolved = resolve(config_file, settings, flags, choose_plan(resolved))
    command = [script, *script_args]
    if trainer:
        command, module = with_trainer(command, module=module, no_python=no_python), True
    if printed or file:
        from drivetrain.launch.dry_run import CommandLine

        pairs = [] if config_file is None else [("config", str(Path(config_file).absolute()))]
        pairs += [(name, flags[name]) for name in FLAGS if flags.get(name) is not None]
        pairs += [("set", setting) for setting in settings]
        switches = [f"--{name}" for name in SWITCHES if flags.get(name)]
        switches += ["-m"] * module + ["--no_python"] * no_python + ["--quiet"] * quiet
        typed = CommandLine(tuple(pairs), tuple(switches), tuple(command))
        if file:
            _write(resolved, typed, file, kind="Slurm" if slurm else kubernetes_kind, image=image or "")
        else:
            _show(resolved, typed, module=module)
        return
    from drivetrain.launch import output
    from drivetrain.launch import script as scripts
    from drivetrain.launch.plan import describe, make_plan

    scripts.check_command(command, module=module, no_python=no_python)
    plan = make_plan(resolved)
    if not quiet:
        remark = output.describe(resolved.config.output, plan.processes_here, plan.machine_rank)
        said = (describe(plan, resolved), found, _unused(resolved, plan.backend), _behind(script, script_args), remark)
        click.echo("\n".join(filter(None, said)), err=True)
    code = scripts.launch(resolved, command, module=module, no_python=no_python, plan=plan)
    gc.freeze()
    sys.exit(code)


def _unused(resolved: ResolvedConfig, backend: str) -> str:
    """Return a line about sections of backends that do not train; empty without one."""
    idle = [name for name, values in resolved.sections.items() if values and name != backend]
    if not idle:
        return ""
    verb = "is a section" if len(idle) == 1 else "are sections"
    return f"Not used: {', '.join(sorted(idle))}, which {verb} of the configuration, since {backend} trains."


_ONLY_OURS = frozenset(
    {"num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "distributed_type"}
    | {"config_file", "rdzv_backend", "accelerator_ids", "local_ranks_filter", "max_restarts"}
)
"""Options that no script is likely to have itself, as many have ``--mixed_precision`` or ``--config``."""


def _behind(script: str, script_args: tuple[str, ...]) -> str:
    """Return a hint about launcher options after the script, which are passed to it; empty without any."""
    names = [each.partition("=")[0] for each in script_args if each.startswith("--")]
    ours = [name for name in names if normalise(name[2:]) in _ONLY_OURS]
    if not ours:
        return ""
    return f"Given to {Path(script).name}: {', '.join(ours)}. Options of the launcher stand before the script."


def with_trainer(command: list[str], *, module: bool, no_python: bool) -> list[str]:
    """The module of drivetrain-transformers that runs a script with its Trainer, and the script as its arguments."""
    if no_python:
        raise UsageError(
            "--trainer changes what a Python script imports, and --no_python starts a program",
            cure="Leave one of the two out.",
        )
    check_installed("transformers", "--trainer")
    return ["drivetrain_transformers.script", *["-m"] * module, *command]


def choose_plan(resolved: ResolvedConfig) -> Mapping[str, Any]:
    """Return the settings that the installed planner chooses for ``distributed_type: auto``.

    Raises:
        BackendNotFoundError: none is.
        UsageError: as the planner does.
    """
    from drivetrain.registry import get_registry, pip_line

    chosen = get_registry().choose(resolved)
    if chosen is None:
        raise BackendNotFoundError(
            "distributed_type: auto is chosen by a planner, and none is installed", cure=f"Run: {pip_line('planner')}"
        )
    return chosen


def _show(resolved: ResolvedConfig, typed: CommandLine, *, module: bool) -> None:
    """Print what would be run. The job may run on other machines, so this one's devices are not checked."""
    from drivetrain.launch import dry_run, script
    from drivetrain.launch.plan import make_plan

    plan = make_plan(resolved, elsewhere=True)
    worker = script.worker_command(typed.command, module=module, no_python="--no_python" in typed.switches)
    for line in dry_run.machines(plan, typed, script.worker_variables(resolved, plan), worker):
        click.echo(line)


def _write(resolved: ResolvedConfig, typed: CommandLine, file: str, *, kind: str, image: str) -> None:
    """Write the file that a cluster is given: a batch file, or a manifest of this kind."""
    from drivetrain.launch.plan import make_plan

    if resolved.config.main_process_ip is None:
        # The file fills it in.
        resolved = replace(resolved, config=resolved.config.model_copy(update={"main_process_ip": "first"}))
    plan = make_plan(resolved, elsewhere=True)
    submit = import_module("drivetrain_clusters").write(
        *(plan, typed, file),
        kind=kind,
        image=image,
        on_cpu=resolved.config.use_cpu or plan.on_cpu,
        resumable=resolved.config.save_on_interrupt,
    )
    click.echo(f"Wrote {file}. Submit it: {submit}")
