"""What the README and the documents tell people to type works as it stands."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("[a-z]*/README.md"))]
PAGES += sorted(ROOT.glob("plugins/*/README.md"))


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def shell_lines(text):
    return [line.strip() for block in blocks(text, "sh") for line in block.splitlines() if line.strip()]


def recipes():
    """Each target of the Makefile with the commands that it runs, written as a person would."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = {}
    for name, body in re.findall(r"^([a-z]+):[^\n]*\n((?:\t[^\n]*\n)*)", text, flags=re.MULTILINE):
        found[name] = [line.strip().replace("$(BIN)", ".venv/bin") for line in body.splitlines()]
    return found


def run(command, folder):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def example(tmp_path):
    """The README's script and its configuration, saved under the names that its command uses."""
    (tmp_path / "script.py").write_text(blocks(README, "python")[0], encoding="utf-8")
    (tmp_path / "config.yaml").write_text(blocks(README, "yaml")[0], encoding="utf-8")
    return tmp_path


FIRST = list(zip(shell_lines(README)[:3], blocks(README, "text")[0].splitlines(), strict=True))
"""The first commands, and the line that the README says each prints."""


@pytest.mark.parametrize(
    ("command", "line"), [pytest.param(*each, marks=[pytest.mark.slow] * ("torchrun" in each[0])) for each in FIRST]
)
def test_the_readmes_script_prints_what_the_readme_says(example, command, line):
    assert run(command, example) == f"{line}\n"


def test_it_is_one_loss():
    assert len({line.partition(", ")[2] for _, line in FIRST}) == 1


@pytest.mark.parametrize("command", shell_lines(README))
def test_every_command_of_the_readme_is_one_that_is_tested(command):
    known = recipes()
    if command.startswith("make "):
        assert command.removeprefix("make ") in known
    elif command in dict(FIRST):
        assert "script.py" in command  # test_the_readmes_script_prints_what_the_readme_says
    elif " launch " in command:
        assert command in known["train"]
    elif "pip install" in command:
        wanted = [line for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if " -m pip " in line]
        assert command.partition(" install ")[2] in {line.partition(" --quiet ")[2] for line in wanted}
    else:
        assert command == "python3.11 -m venv .venv"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_on_every_page_compiles(page):
    for block in blocks(page.read_text(encoding="utf-8"), "python"):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_configurations_on_every_page_are_good(page, tmp_path):
    from drivetrain.config import load_config

    for block in blocks(page.read_text(encoding="utf-8"), "yaml"):
        file = tmp_path / "config.yaml"
        file.write_text(block, encoding="utf-8")
        load_config(file, environ={})


def test_extras_on_every_page_exist():
    import tomllib

    project = tomllib.loads((ROOT / "core/pyproject.toml").read_text(encoding="utf-8"))["project"]
    for page in PAGES:
        for names in re.findall(r'"drivetrain\[([a-z,]+)\]"', page.read_text(encoding="utf-8")):
            assert set(names.split(",")) <= set(project["optional-dependencies"]), page


@pytest.fixture(scope="module")
def generate():
    """The program that writes the generated parts."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_how_to_is_above_two_screens(generate):
    assert generate.long_pages() == {}, "split it by task, or move tables to docs/reference"


def test_generated_parts_are_up_to_date(generate):
    old = [path.name for path, text in generate.documents().items() if path.read_text(encoding="utf-8") != text]
    assert old == [], "run: make docs"
