from __future__ import annotations

import subprocess
import sys

import yaml

from drivetrain.config import Config, ResolvedConfig, default_file, load_config, rows


def test_rows_say_who_set_what(load, registry):
    resolved = load(
        "distributed_type: alpha\nalpha: {stage: 3}\ngamma: {depth: 2}\n",
        environ={"DRIVETRAIN_DEBUG": "true"},
        overrides={"mesh.tp": 2},
    )
    found = {row.key: (row.value, str(row.origin)) for row in rows(resolved, registry)}
    assert found["distributed_type"] == ("alpha", "c.yaml:1:19")
    assert found["num_machines"] == (1, "default")
    assert found["debug"] == (True, "environment variable DRIVETRAIN_DEBUG")
    assert found["mesh.tp"] == (2, "flag mesh.tp")
    assert found["alpha.stage"] == (3, "c.yaml:2:16")
    assert found["alpha.wrapping.min_params"] == (0, "default")
    assert found["alpha.hook"] == ("no", "default")
    assert found["gamma.depth"] == (2, "c.yaml:3:16")
    assert set(resolved.origins) <= set(found)
    assert all(row.to_dict()["key"] == row.key for row in rows(resolved, registry))


def test_rows_without_a_backend_ask_no_registry(load):
    class Silent:
        """Any question raises AttributeError."""

    found = rows(load(""), Silent())
    assert {row.key.partition(".")[0] for row in found} == set(Config.model_fields)
    assert {str(row.origin) for row in found} == {"default"}


def test_the_default_file_gives_the_defaults(load, registry):
    text = default_file(registry)
    resolved = load(text)
    assert resolved.config == Config()
    assert resolved.sections == {}
    assert set(yaml.safe_load(text)) == set(Config.model_fields)


def test_every_key_of_the_default_file_is_explained(registry):
    lines = default_file(registry).splitlines()
    for number, line in enumerate(lines):
        if line.strip() and not line.lstrip().startswith("#"):
            assert lines[number - 1].lstrip().startswith("# "), line


def test_its_sections_are_valid_once_uncommented(load, registry, alpha):
    text = default_file(registry)
    begin = text.index("# alpha:")
    section = "\n".join(line.removeprefix("# ") for line in text[begin:].splitlines())
    resolved = load(section)
    assert resolved.validated_section(alpha, "alpha") == alpha()
    assert set(resolved.section_for("alpha")) == set(alpha.model_fields)
    assert resolved.section_for("gamma") == {"depth": 1}


def test_the_default_file_of_this_installation(tmp_path):
    file = tmp_path / "default.yaml"
    file.write_text(default_file(), encoding="utf-8")
    resolved = load_config(file, environ={})
    assert resolved.config == Config()
    assert ResolvedConfig.from_json(resolved.to_json()) == resolved


def test_importing_the_package_loads_neither_pydantic_nor_yaml_nor_torch():
    code = "import sys, drivetrain.config; print([m for m in ('pydantic', 'yaml', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.strip() == "[]"


def test_loading_a_configuration_needs_no_torch():
    code = (
        "import sys; from drivetrain.config import load_config, rows, default_file\n"
        "rows(load_config(environ={}, overrides={'distributed_type': 'single'})); default_file()\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.strip() == "False"
