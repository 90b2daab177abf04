"""``drivetrain backends``: lists backends, installed or not, with their distributions and what they can do."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from drivetrain.registry import BackendReport


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
@click.option("-v", "--verbose", is_flag=True, help="With what authors declared, and the traceback of what is broken.")
def backends(as_json: bool, verbose: bool) -> None:
    """List the backends: whose they are, what they can do, ready or why not and the cure; then those not installed."""
    from drivetrain.registry import get_registry, known_extras

    reports = get_registry().reports()
    if as_json:
        click.echo(json.dumps([to_dict(report) for report in reports], indent=2))
        return
    absent = sorted(set(known_extras()) - {report.name for report in reports})
    lines = [plain(report, verbose=verbose) for report in reports] + [not_installed(name) for name in absent]
    click.echo("\n".join(lines))


def not_installed(name: str) -> str:
    """Return the line of a backend of ours that is not installed, with the command that installs it."""
    from drivetrain.registry import pip_line

    return f"{name}  {click.style('not installed', fg='yellow')}  Run: {pip_line(name)}"


def to_dict(report: BackendReport) -> dict[str, Any]:
    """Return a report as JSON data: sets become sorted lists."""
    fields = dataclasses.asdict(report)
    if report.capabilities is not None:
        fields["capabilities"] = {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in dataclasses.asdict(report.capabilities).items()
        }
    return fields


def plain(report: BackendReport, *, verbose: bool) -> str:
    """Return a report as a few lines of text: its state, why it is not ready and what to do, what it can do."""
    owner = f"{report.distribution} {report.version}".strip()
    state = "ready" if report.ready else "broken" if report.capabilities is None else "blocked"
    shown = click.style(state, fg={"ready": "green", "blocked": "yellow", "broken": "red"}[state])
    lines = [f"{report.name}  {shown}  [{owner}]  {report.summary}".rstrip()]
    lines += [f"    {remark}" for remark in (report.why, report.cure) if remark]
    if report.capabilities:
        lines += [f"    {line}" for line in (words(report), *(declared(report) if verbose else ())) if line]
    lines += [f"    {line}" for line in report.traceback.rstrip().splitlines()] if verbose else []
    return "\n".join(lines)


QUESTIONS = {
    "saves while training goes on": "async_save",
    "LocalSGD": "replicated",
    "ranks with fewer batches (join_uneven_inputs)": "join_uneven_inputs",
    "one optimizer for several models": "optimizer_spans_models",
}
"""Capabilities by the question that they answer."""


def words(report: BackendReport) -> str:
    """Return what a backend can do, in a user's words."""
    can = report.capabilities
    assert can is not None
    parts = ["several processes" if can.multi_process else "one process"]
    precisions = sorted(can.precisions, key=lambda each: (each != "no", each))
    parts += [f"mixed_precision {', '.join(precisions)}"] if precisions else []
    parts += [f"mesh {', '.join(sorted(can.mesh_axes))}"] if can.mesh_axes else []
    parts += [f"devices {', '.join(sorted(can.devices))}"] if can.devices else []
    parts += [f"{question}: {'yes' if getattr(can, flag) else 'no'}" for question, flag in QUESTIONS.items()]
    return "; ".join(parts)


def declared(report: BackendReport) -> list[str]:
    """Return what the author of a backend declared: the flags of its capabilities, contract and aliases."""
    assert report.capabilities is not None
    values = dataclasses.asdict(report.capabilities)
    flags = [name if value else f"not {name}" for name, value in values.items() if isinstance(value, bool)]
    sets = [f"{name} {'/'.join(sorted(each))}" for name, each in values.items() if isinstance(each, frozenset) and each]
    lines = [f"declares: {', '.join([*flags, *sets])}; contract {report.api}"]
    return [*lines, *([f"also written: {', '.join(report.aliases)}"] if report.aliases else [])]
