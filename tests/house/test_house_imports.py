"""Light modules import nothing heavy, and torch is imported in its packages only. `make lint` checks the rest."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys

HEAVY = ("torch", "numpy", "deepspeed", "megatron", "torch_xla", "accelerate", "transformers")

TORCH_PATHS = (
    "accelerator.py",
    "backends/",
    "checkpoint/",
    # Trains, in the workers of `drivetrain test`.
    "cli/self_test.py",
    "compat/availability.py",
    "compat/functions.py",
    "compat/memory.py",
    "compat/state.py",
    "data/",
    "distributed/",
    "loop/",
    "run_comparison.py",
    "run_record.py",
    "run_setup.py",
)
"""Under core/src/drivetrain."""

LAZY_TORCH_PATHS = (
    # Opens the store where workers meet, and counts accelerators.
    "launch/",
    # Prints what torch finds.
    "cli/env.py",
)
"""Where torch may be imported inside of functions, when it is needed."""

LIGHT = (
    "drivetrain",
    "drivetrain.api",
    "drivetrain.api.accelerate",
    "drivetrain.api.config",
    "drivetrain.api.engines",
    "drivetrain.api.programs",
    "drivetrain.registry",
    "drivetrain.hookspecs",
    "drivetrain.topology",
    "drivetrain.kwargs",
    "drivetrain.logging",
    "drivetrain.tracking",
    "drivetrain.config",
    "drivetrain.config.load",
    "drivetrain.data",
    "drivetrain.launch.environment",
    "drivetrain.launch.script",
    "drivetrain.cli.main",
    "drivetrain.backends.plugin",
)

PROBE = """
import importlib, json, sys
found = {}
for name in sys.argv[2:]:
    importlib.import_module(name)
    heavy = sorted(set(sys.argv[1].split(",")) & set(sys.modules))
    if heavy:
        found[name] = heavy
        break
print(json.dumps(found))
"""


def probe(names):
    command = [sys.executable, "-c", PROBE, ",".join(HEAVY), *names]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180, env=dict(os.environ))
    return json.loads(answer.stdout)


def imports(path):
    """(module, inside a function, line) of every import that runs; those under TYPE_CHECKING do not."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []

    def visit(node, inside):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.orelse:
                visit(child, inside)
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, inside, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.module, inside, node.lineno))
        deeper = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, deeper)

    visit(tree, inside=False)
    return found


def is_in(module, *packages):
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_light_modules_import_nothing_heavy():
    assert probe(LIGHT) == {}


def test_a_plugin_describes_itself_without_its_engine(plugin):
    package = plugin.package.name
    if plugin.is_library:
        return
    hooks = plugin.project.get("entry-points", {}).get("drivetrain.hooks", {})
    light = [f"{package}.plugin", f"{package}.config"] if plugin.has_backend else sorted(set(hooks.values()))
    if not light and (plugin.package / "command.py").is_file():
        light = [f"{package}.command"]
    assert probe([package, *light]) == {}


def test_the_probe_sees_torch():
    assert probe(["json", "torch"]).keys() == {"torch"}


STARTS = """
import sys
import torch
before = set(sys.modules)
from drivetrain import Accelerator
Accelerator(cpu=True, distributed_type="single")
print(*sorted(name for name in sys.argv[1:] if name in sys.modules and name not in before))
"""

LATER = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor")
"""Parts of torch that take half as long to import as torch itself, and that a run may not need."""


def test_an_accelerator_starts_without_parts_of_torch_that_are_slow_to_import():
    command = [sys.executable, "-c", STARTS, *LATER]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180, env=dict(os.environ))
    assert answer.stdout.split() == []


def test_torch_is_imported_in_its_packages_only(core):
    strays = []
    for path in core.sources:
        name = path.relative_to(core.package).as_posix()
        if name.startswith(TORCH_PATHS):
            continue
        strays += [
            f"{name}:{line} imports {module}"
            for module, inside, line in imports(path)
            if is_in(module, "torch", "safetensors.torch") and not (inside and name.startswith(LAZY_TORCH_PATHS))
        ]
    assert strays == []


def test_a_backend_is_light_up_to_its_description(core):
    for module, _, line in imports(core.package / "backends/plugin.py"):
        assert not is_in(module, "torch"), line


def test_only_the_registry_finds_plugins(core):
    allowed = {"registry.py", "hookspecs.py"}
    strays = [
        f"{path.relative_to(core.package)}:{line} imports {module}"
        for path in core.sources
        for module, _, line in imports(path)
        if is_in(module, "pluggy") and path.name not in allowed
    ]
    finders = [path.name for path in core.sources if "entry_points(" in path.read_text(encoding="utf-8")]
    assert strays == []
    assert finders == ["registry.py"]


def test_a_plugin_imports_the_api_and_nothing_else_of_the_core(plugin):
    # One that brings no engine stands on top, as a script does.
    api = ("drivetrain.api", *(f"drivetrain.api.{name}" for name in ("accelerate", "config", "engines", "programs")))
    allowed = api if plugin.has_backend else (*api, "drivetrain")
    strays = [
        f"{path.name}:{line} imports {module}"
        for path in plugin.sources
        for module, _, line in imports(path)
        if is_in(module, "drivetrain") and module not in allowed
    ]
    assert strays == []


def test_a_plugins_tests_import_the_api_and_the_kit(plugin):
    lists = [plugin.project["dependencies"], *plugin.project.get("optional-dependencies", {}).values()]
    declared = [re.split(r"[<>=\[]", one)[0].replace("-", "_") for rest in lists for one in rest if "-" in one]
    allowed = ("drivetrain.api", "drivetrain_testing", "drivetrain.utils", plugin.package.name, *declared)
    strays = [
        f"{path.name}:{line} imports {module}"
        for path in sorted((plugin.folder / "tests").rglob("*.py"))
        for module, _, line in imports(path)
        if module.startswith("drivetrain") and module != "drivetrain" and not is_in(module, *allowed)
    ]
    assert strays == []
