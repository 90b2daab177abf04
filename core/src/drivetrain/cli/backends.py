"""``drivetrain backends``: lists the installed backends, their distributions, capabilities and readiness."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from drivetrain.registry import BackendReport


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
@click.option("-v", "--verbose", is_flag=True, help="With all capabilities, and the traceback of what is broken.")
def backends(as_json: bool, verbose: bool) -> None:
    """List the backends: whose they are, what they can do, ready or why not and the cure."""
    from drivetrain.registry import get_registry

    reports = get_registry().reports()
    if as_json:
        click.echo(json.dumps([to_dict(report) for report in reports], indent=2))
    else:
        click.echo("\n".join(plain(report, verbose=verbose) for report in reports))


def to_dict(report: BackendReport) -> dict[str, Any]:
    """Return a report as JSON knows it: sets become sorted lists."""
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
    lines += [f"    can: {', '.join(abilities(report, verbose=verbose))}"] if report.capabilities else []
    lines += [f"    {line}" for line in report.traceback.rstrip().splitlines()] if verbose else []
    return "\n".join(lines)


def abilities(report: BackendReport, *, verbose: bool) -> list[str]:
    """Return the capabilities that a backend declares: flags that are set, then sets."""
    assert report.capabilities is not None
    values = dataclasses.asdict(report.capabilities)
    words = [name for name, value in values.items() if value is True]
    sets = {name: value for name, value in values.items() if isinstance(value, frozenset) and value}
    if not verbose:
        sets = {name: sets[name] for name in ("precisions", "mesh_axes") if name in sets}
    words += [f"{name}: {'/'.join(sorted(value))}" for name, value in sets.items()]
    if verbose:
        words += [f"not {name}" for name, value in values.items() if value is False]
        words += [f"contract {report.api}", *(f"alias {alias}" for alias in report.aliases)]
    return words
