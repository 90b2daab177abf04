"""Every code block of the documents runs, page by page, each page in an empty folder.

A comment in the line before a block, which no reader sees, says what is special about it:

- `<!-- saved as: train.py -->`: the block is that file, for the commands of the page.
- `<!-- not run: reason -->`: it needs what is not here.
- `<!-- prints -->`: what the Python or the commands above it print, line by line; `...` stands for any lines.

All other Python of a page is one program, run on two ranks; `<!-- after: fsdp.py -->` puts a file of
`tests/docs/before/` there. Commands run afterwards, in their order. Configurations are loaded by tests/readme.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from drivetrain.cli.main import drivetrain
from drivetrain_testing import spawn

ROOT = Path(__file__).resolve().parents[2]
BEFORE = Path(__file__).parent / "before"
FROZEN = ROOT / "tests/house/frozen"
BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\S*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PIECE = re.compile(rf"^<!-- after: (\S+) -->$|{BLOCK.pattern}", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(\$ )?(drivetrain|python|pip|pytest|torchrun|make|sbatch|deepspeed|accelerate) ", re.MULTILINE)
COMMANDS = {"sh", "console"}
LANGUAGES = {"python", "yaml", "toml", "text"} | COMMANDS

ELSEWHERE = {
    # Their blocks belong to one story, which a test of its own follows.
    "tutorial/first-run.md": "tests/docs/test_docs_tutorial.py",
    "tutorial/one-line.md": "tests/docs/test_docs_tutorial.py",
    "how-to/from-fabric.md": "tests/docs/test_docs_fabric.py",
    "how-to/write-a-backend.md": "tests/third_party/test_third_party_new_plugin.py",
    "how-to/describe-a-backend.md": "tests/third_party/test_third_party_new_plugin.py",
    "how-to/certify-a-backend.md": "tests/third_party/test_third_party_new_plugin.py",
    "how-to/pipeline-schedules.md": "plugins/megatron/tests/test_megatron_planner.py",
    "how-to/search-a-schedule.md": "plugins/megatron/tests/test_megatron_planner.py",
    "how-to/model-layout.md": "plugins/megatron/tests/test_megatron_layouts.py",
}


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Args:
        note: the comment before it.
        language: the word behind the fence.
        body: what is in it.
    """

    note: str
    language: str
    body: str

    @property
    def file(self) -> str:
        """The name that it is saved under, if any."""
        return self.note.removeprefix("saved as: ") if self.note.startswith("saved as: ") else ""

    @property
    def runs(self) -> bool:
        return not self.note.startswith("not run: ")

    @property
    def printed(self) -> bool:
        """Whether it shows what the block above it prints."""
        return self.note == "prints"

    def commands(self) -> list[str]:
        """Its command lines; a line of a console without a prompt is output."""
        joined = self.body.replace("\\\n", " ")
        lines = [line.partition("  #")[0].strip() for line in joined.splitlines()]
        if self.language == "console":
            return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in lines if line and not line.startswith("#")]


def blocks(text):
    """Blocks of a page, without directives of the site."""
    found = [Block(*(part or "" for part in match)) for match in BLOCK.findall(text)]
    return [block for block in found if not block.language.startswith("{")]


PAGES = {path.relative_to(ROOT / "docs").as_posix(): path for path in sorted((ROOT / "docs").rglob("*.md"))}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
RUNNING = [name for name, text in TEXTS.items() if COMMANDS | {"python"} & {block.language for block in blocks(text)}]


def program(text):
    """The Python of a page that is no file of its own."""
    parts = []
    for before, *block in PIECE.findall(text):
        if before:
            parts.append((BEFORE / before).read_text(encoding="utf-8"))
        elif (found := Block(*block)).language == "python" and found.runs and not found.file:
            parts.append(found.body)
    return "\n".join(parts)


def run_on_rank(folder, source, page):
    """One rank of a page's program."""
    os.chdir(folder)
    namespace = {"__name__": "__main__"}
    exec(compile(source, page, "exec"), namespace)
    if "accelerator" in namespace:
        namespace["accelerator"].end_training()


def shows(expected, output):
    """Whether an output has the lines that a page shows, in which a line `...` stands for any lines."""
    parts = [re.escape(line.rstrip()) if line.strip() != "..." else None for line in expected.strip("\n").splitlines()]
    pattern = "".join(r"(?:.*\n)*?" if part is None else rf"{part}[ ]*\n" for part in parts)
    return re.fullmatch(pattern, output.strip("\n") + "\n") is not None


def run_command(command, folder):
    """As typed, but for commands that start no processes: those run in here, which spares them an import of torch.

    Returns:
        What it printed.
    """
    words = shlex.split(command)
    if words[0] == "drivetrain" and words[1] not in {"compare", "launch", "test"}:
        with contextlib.chdir(folder):
            outcome = CliRunner().invoke(drivetrain, words[1:], catch_exceptions=False)
        assert outcome.exit_code == 0, f"{command}\n{outcome.output}"
        return outcome.output
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


COSTLY = (
    "explanation/conformance.md", "explanation/pipelines.md", "how-to/dp-or-ddp.md", "how-to/loaders.md",
    "how-to/planner-check.md", "how-to/planner-machines.md", "how-to/planner.md", "how-to/trainer.md",
    "how-to/which-backend.md",
)  # fmt: skip
"""Pages whose programs take ten seconds of processor time and more."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in COSTLY))
        for name in RUNNING
        if name not in ELSEWHERE
    ],
)
def test_the_blocks_of_a_page_run(name, tmp_path, capsys):
    found = blocks(TEXTS[name])
    for block in found:
        if block.file:
            path = tmp_path / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf-8")
    promised = {block: before for before, block in zip([None, *found], found, strict=False) if block.printed}
    if source := program(TEXTS[name]):
        spawn(run_on_rank, 2, tmp_path, source, str(PAGES[name]))
        output = capsys.readouterr().out
        if lines := [block.body for block, before in promised.items() if before.language == "python"]:
            assert shows("".join(lines), output), f"the program of {name} prints:\n{output}"
    output = ""
    for block in found:
        if block.language in COMMANDS and block.runs:
            output = "".join(run_command(command, tmp_path) for command in block.commands())
        elif block.printed and promised[block].language in COMMANDS:
            assert shows(block.body, output), f"the commands of {name} print:\n{output}"


@pytest.mark.parametrize("name", [name for name in TEXTS if any(block.printed for block in blocks(TEXTS[name]))])
def test_what_a_page_prints_stands_below_what_prints_it(name):
    found = blocks(TEXTS[name])
    for before, block in zip([None, *found], found, strict=False):
        if block.printed:
            assert before is not None, name
            assert before.runs, name
            assert before.language in COMMANDS or (before.language == "python" and not before.file), name


def test_another_output_is_noticed():
    assert shows("a\n...\nd\n", "a\nb\nc\nd\n")
    assert shows("a\n...\n", "a\n")
    assert not shows("a\n", "a\nb\n")
    assert not shows("loss 0.1\n", "loss 0.2\n")


@pytest.mark.parametrize("name", PAGES)
def test_every_block_says_what_it_is(name):
    for block in blocks(TEXTS[name]):
        assert block.language in LANGUAGES, f"a block of {name} has no language that is known here:\n{block.body}"
        if block.language == "text":
            assert not COMMAND.search(block.body), f"{name} hides commands from the tests:\n{block.body}"
        if not block.runs:
            assert len(block.note) > len("not run: ") + 10, f"{name} gives no reason:\n{block.body}"
    rest = BLOCK.sub("", TEXTS[name])
    assert not re.search(r"^\n    \S", rest, re.MULTILINE), f"{name}: fence code, so that it is seen here"


@pytest.mark.parametrize("owner", ["drivetrain", "drivetrain.Accelerator"])
def test_every_public_name_is_in_a_program_that_runs(owner):
    if owner == "drivetrain":
        lines = (FROZEN / "public_names.txt").read_text(encoding="utf-8").splitlines()
        names = [line.rpartition(".")[2] for line in lines if line.rpartition(".")[0] == owner]
        before = r"(?<![\w.])"
    else:
        lines = (FROZEN / "accelerator.txt").read_text(encoding="utf-8").splitlines()[1:]
        names = [re.match(r"\w+", line).group() for line in lines]
        before = r"\baccelerator\."
    shown = (block for text in TEXTS.values() for block in blocks(text) if block.language == "python" and block.runs)
    code = "\n".join(block.body for block in shown)
    missing = [name for name in names if not re.search(rf"{before}{name}\b", code)]
    assert missing == [], "add them to docs/reference/examples.md, where each name is in a program"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_pages_that_are_run_elsewhere_are(name):
    assert name.rpartition("/")[2] in (ROOT / ELSEWHERE[name]).read_text(encoding="utf-8")
