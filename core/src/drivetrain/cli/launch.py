"""``drivetrain launch``: runs a script on every process of this machine."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.cli.options import FLAGS, SWITCHES, configuration_options, normalise, resolve

if TYPE_CHECKING:
    from drivetrain.config import ResolvedConfig
    from drivetrain.launch.dry_run import CommandLine


class Launch(click.Command):
    """A command whose errors suggest what to write instead of another launcher's option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
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
    epilog="Options of the launcher go before the script, those of the script after it.",
)
@configuration_options
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as after `python -m`.")
@click.option("--no_python", is_flag=True, help="SCRIPT is a program; start it without Python in front.")
@click.option("-q", "--quiet", is_flag=True, help="Do not print the lines that say what is launched and shown.")
@click.option("--print", "printed", is_flag=True, help="Show what each machine would run and with what; run nothing.")
@click.option("--slurm", metavar="FILE", help="Write a batch file for Slurm's sbatch instead of running anything.")
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def launch(
    config_file: str | None,
    settings: tuple[str, ...],
    module: bool,
    no_python: bool,
    quiet: bool,
    printed: bool,
    slurm: str | None,
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
    if not (printed or slurm or flags.get("cpu")):  # on the CPU torch is wanted after the workers were started
        from drivetrain.launch.devices import preload_torch

        preload_torch()
    resolved = resolve(config_file, settings, flags)
    command = [script, *script_args]
    if printed or slurm:
        from drivetrain.launch.dry_run import CommandLine

        pairs = [] if config_file is None else [("config", str(Path(config_file).absolute()))]
        pairs += [(name, flags[name]) for name in FLAGS if flags.get(name) is not None]
        pairs += [("set", setting) for setting in settings]
        switches = [f"--{name}" for name in SWITCHES if flags.get(name)]
        switches += ["-m"] * module + ["--no_python"] * no_python + ["--quiet"] * quiet
        _show(resolved, CommandLine(tuple(pairs), tuple(switches), tuple(command)), slurm=slurm, module=module)
        return
    from drivetrain.launch import output
    from drivetrain.launch import script as scripts
    from drivetrain.launch.plan import describe, make_plan

    plan = make_plan(resolved)
    if not quiet:
        remark = output.describe(resolved.config.output, plan.processes_here, plan.machine_rank)
        click.echo("\n".join(filter(None, (describe(plan, resolved), remark))), err=True)
    code = scripts.launch(resolved, command, module=module, no_python=no_python, plan=plan)
    gc.freeze()
    sys.exit(code)


def _show(resolved: ResolvedConfig, typed: CommandLine, *, slurm: str | None, module: bool) -> None:
    """Print what would be run. The job may run on other machines, so this one's devices are not checked."""
    from drivetrain.launch import dry_run, script
    from drivetrain.launch.plan import make_plan

    if slurm is not None and resolved.config.main_process_ip is None:
        # The batch file fills it in.
        resolved = replace(resolved, config=resolved.config.model_copy(update={"main_process_ip": "first"}))
    plan = make_plan(resolved, elsewhere=True)
    if slurm is None:
        worker = script.worker_command(typed.command, module=module, no_python="--no_python" in typed.switches)
        for line in dry_run.machines(plan, typed, script.worker_variables(resolved, plan), worker):
            click.echo(line)
        return
    devices = 0 if resolved.config.use_cpu or plan.on_cpu else plan.processes_here
    text = dry_run.batch_file(plan, typed, accelerators=devices, resumable=resolved.config.save_on_interrupt)
    Path(slurm).write_text(text, encoding="utf-8")
    click.echo(f"Wrote {slurm}. Submit it: sbatch {slurm}")
