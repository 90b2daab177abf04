"""What other people's code may rely on does not change by accident.

Each file in `frozen/` holds one surface. A change on purpose is made by running these tests once with
`DRIVETRAIN_UPDATE_FROZEN=1`, reading the difference, and writing a line in `changes.d/`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from pathlib import Path

import pytest

from drivetrain_testing import spawn

FROZEN = Path(__file__).parent / "frozen"


class Named:
    """Stands for a function that is a default, whose own representation holds an address."""

    def __init__(self, function):
        self.function = function

    def __repr__(self):
        return self.function.__name__


def signature(value):
    """Parameters and defaults; annotations are for the type checker and may become more precise."""
    found = inspect.signature(value)
    bare = [
        each.replace(
            annotation=inspect.Parameter.empty,
            default=Named(each.default) if inspect.isfunction(each.default) else each.default,
        )
        for each in found.parameters.values()
    ]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def members(kind):
    """Public methods with their signatures and properties, also inherited ones of ours, not torch's or object's."""
    for name in sorted(dir(kind)):
        value = inspect.getattr_static(kind, name)
        if name.startswith("_"):
            continue
        mark = " (abstract)" if getattr(value, "__isabstractmethod__", False) else ""
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, property) or not callable(value):
            yield name + (" (read and write)" if isinstance(value, property) and value.fset else "") + mark
        else:
            yield f"{name}{signature(value)}{mark}"


def public_names():
    beside = [f"drivetrain.api.{name}" for name in ("accelerate", "config", "engines", "programs")]
    for name in ("drivetrain", "drivetrain.api", *beside, "drivetrain_testing"):
        module = importlib.import_module(name)
        for each in sorted(module.__all__):
            assert getattr(module, each) is not None, each
            yield f"{name}.{each}"


def accelerator():
    from drivetrain import Accelerator

    yield f"Accelerator{signature(Accelerator)}"
    yield from members(Accelerator)


def contract():
    from drivetrain.api import CONTRACT, Backend, BackendInfo, Capabilities, Readiness, RunSettings, Trainable

    yield f"CONTRACT = {CONTRACT}"
    for kind in (Backend, Trainable):
        yield from (f"{kind.__name__}.{line}" for line in members(kind))
    for kind in (BackendInfo, Capabilities, Readiness, RunSettings):
        yield from (f"{kind.__name__}.{field.name}" for field in dataclasses.fields(kind))


def hooks():
    from drivetrain import hookspecs

    for name, function in inspect.getmembers(hookspecs, inspect.isfunction):
        if name.startswith("drivetrain_"):
            yield f"{name}{signature(function)}"


def config_keys():
    from pydantic import BaseModel

    from drivetrain.config.schema import Config
    from drivetrain.registry import get_registry

    def keys(model, prefix):
        for name, field in model.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys(kind, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name} = {field.get_default(call_default_factory=True)!r}"

    yield from keys(Config, "")
    registry = get_registry()
    for report in registry.reports():
        section = registry.load_section(registry.info(report.name))
        if section is not None:
            yield from keys(section, f"{report.name}.")


def cli_flags():
    """In a process of its own: other tests of this one may have registered commands."""
    return spawn(flags_of_all_commands, 1)[0]


def flags_of_all_commands():
    import click

    from drivetrain.cli.main import drivetrain

    def flags(command, path, context):
        for parameter in command.get_params(context):
            names = "/".join((*parameter.opts, *parameter.secondary_opts))
            yield f"{path} {names}"
        if isinstance(command, click.Group):
            for name in sorted(command.list_commands(context)):
                child = command.get_command(context, name)
                yield from flags(child, f"{path} {name}", click.Context(child, info_name=name, parent=context))

    return list(flags(drivetrain, "drivetrain", click.Context(drivetrain, info_name="drivetrain")))


@pytest.mark.parametrize("surface", [public_names, accelerator, contract, hooks, config_keys, cli_flags])
def test_a_surface_is_as_it_was(surface):
    lines = list(surface())
    file = FROZEN / f"{surface.__name__}.txt"
    if os.environ.get("DRIVETRAIN_UPDATE_FROZEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert lines == file.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", ["utils", "state", "local_sgd", "launchers", "data_loader"])
def test_names_are_where_scripts_for_accelerate_import_them(name):
    import drivetrain

    importlib.import_module("drivetrain.utils.tqdm")  # a module and a function of one name
    module = importlib.import_module(f"drivetrain.{name}")
    for each in drivetrain.__all__:
        if not each.startswith("__"):
            assert getattr(module, each) is getattr(drivetrain, each), each
