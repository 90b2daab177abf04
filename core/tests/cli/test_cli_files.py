"""Which configuration file a command reads where none is named, and the help on a section."""

from __future__ import annotations

import pytest

SCRIPT = "print('ran')\n"


@pytest.fixture
def files(tmp_path):
    """Files by name, in the order in which they are looked for; each has another number of micro-batches."""
    places = {
        "folder": tmp_path / "drivetrain.yaml",
        "user": tmp_path / "settings" / "drivetrain" / "drivetrain.yaml",
        "accelerate": tmp_path / "hub" / "accelerate" / "default_config.yaml",
        "accelerate's json": tmp_path / "hub" / "accelerate" / "default_config.json",
    }
    for number, path in enumerate(places.values(), 2):
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f"gradient_accumulation_steps: {number}\n"
        path.write_text(text if path.suffix == ".yaml" else f'{{"gradient_accumulation_steps": {number}}}')
    return places


def steps(drivetrain, tmp_path, *arguments, **environment):
    where = {"XDG_CONFIG_HOME": str(tmp_path / "settings"), "HF_HOME": str(tmp_path / "hub")}
    done = drivetrain("config", "show", *arguments, **where, **environment)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "gradient_accumulation_steps" in line]
    return int(line.split()[1]), done.stderr


def test_files_are_found_in_order(drivetrain, tmp_path, files):
    for number, path in enumerate(files.values(), 2):
        found, said = steps(drivetrain, tmp_path)
        assert found == number
        assert path.name in said
        assert "none was named" in said
        path.unlink()
    assert steps(drivetrain, tmp_path) == (1, "")


def test_a_file_that_is_named_comes_first(drivetrain, tmp_path, files):
    named = tmp_path / "named.yaml"
    named.write_text("gradient_accumulation_steps: 9\n")
    assert steps(drivetrain, tmp_path, "--config", named) == (9, "")
    assert steps(drivetrain, tmp_path, DRIVETRAIN_CONFIG_FILE=str(named)) == (9, "")


def test_the_launcher_says_which_file_it_read(drivetrain, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "drivetrain.yaml").write_text("use_cpu: true\nnum_processes: 1\n")
    done = drivetrain("launch", "train.py", HF_HOME=str(tmp_path), XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "configuration drivetrain.yaml (none was named" in done.stderr


def test_the_users_own_file_is_written_where_it_is_found(drivetrain, tmp_path):
    where = {"XDG_CONFIG_HOME": str(tmp_path / "settings"), "HF_HOME": str(tmp_path)}
    done = drivetrain("config", "--default", "--user", **where)
    assert done.returncode == 0, done.stderr
    assert "Use it: drivetrain launch script.py" in done.stdout
    assert "settings" in drivetrain("config", "show", **where).stderr


def test_the_help_on_a_section(drivetrain):
    done = drivetrain("launch", "-h", "FSDP")
    assert done.returncode == 0
    assert done.stdout.startswith("fsdp:\n")
    assert "  reshard_after_forward: null\n" in done.stdout
    assert drivetrain("launch", "--help", "mesh").stdout.startswith("mesh:\n")
    assert "--config" in drivetrain("launch", "-h").stdout
    unknown = drivetrain("launch", "-h", "fsdq")
    assert unknown.returncode != 0
    assert "fsdp" in unknown.stderr
