"""`python -m benchmarks.paths`: it runs, and what it counts can be so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def paths():
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks import paths
    finally:
        sys.path.remove(str(ROOT))
    return paths


def run(*arguments):
    command = [sys.executable, "-m", "benchmarks.paths", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow
@pytest.mark.timeout(920)
def test_paths_have_calls_files_and_changes(tmp_path):
    written = [tmp_path / "paths.json", tmp_path / "paths.md"]
    done = run("single", "ddp", "launch", "size", "--json", written[0], "--markdown", written[1])
    assert done.returncode == 0, done.stderr
    found = json.loads(written[0].read_text())
    taken = ("Accelerator()", "prepare", "step", "save_state", "load_state")
    names = [f"{place} {path}" for place in ("single", "ddp") for path in taken]
    assert list(found["paths"]) == ["single Accelerator() in a new program", *names, "launch"]
    for name, trace in found["paths"].items():
        calls = trace["calls"]
        files = {call["file"] for call in calls}
        changes = sum(call["changes"] for call in calls)
        assert 0 < len(files) <= len(calls), name
        assert 0 < changes < len(calls), name
        assert all((ROOT / "core" / "src" / file).exists() or file.startswith("drivetrain_") for file in files), name
        assert (trace["imported"] > 0) == (name in {"single Accelerator() in a new program", "launch"}), name
        assert name in done.stdout
        assert name in written[1].read_text()
    steps = {place: found["paths"][f"{place} step"]["calls"] for place in ("single", "ddp")}
    # What the script calls.
    heads = [[call["function"] for call in calls if call["depth"] == 0] for calls in steps.values()]
    assert heads[0] == heads[1]
    assert "Accelerator.backward" in heads[0]
    assert not any(call["file"].startswith("drivetrain_ddp") for call in steps["single"])
    assert any(call["file"].startswith("drivetrain_ddp") for call in steps["ddp"])


def test_a_path_that_does_not_exist_is_named():
    done = run("--calls", "sinlge step")
    assert done.returncode == 2
    assert "sinlge" in done.stderr
    assert "single" not in done.stdout


def test_calls_are_counted_as_described(paths, tmp_path, monkeypatch):
    package = tmp_path / "drivetrain_small"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text(
        "def first():\n"
        "    from drivetrain_small import two\n"
        "    return [two.second(each) for each in numbers()], sorted([2, 1], key=lambda each: two.second(each))\n"
        "\n\n"
        "def numbers():\n"
        "    yield from (1, 2)\n"
    )
    (package / "two.py").write_text(
        "def second(each):\n    return third(each)\n\n\ndef third(each):\n    return each\n\n\nthird(0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    recorder = paths.Recorder()
    recorder._folders = (f"{package}/",)
    from drivetrain_small import one

    with recorder.recording():
        one.first()
    trace = recorder.trace
    once = ["second", "third"]
    expected = ["first", "numbers", *once, *once, *["first.<locals>.<lambda>", *once] * 2]
    assert [call.function for call in trace.calls] == expected
    assert trace.imported == 1
    assert trace.files == 2
    assert trace.changes == 4
    assert [call.depth for call in trace.calls] == [0, 1, 1, 2, 1, 2, 1, 2, 3, 1, 2, 3]
    assert paths.Trace.read(trace.text()) == trace
    shown = paths.sequence(trace).splitlines()
    assert sum(line.startswith("*") for line in shown) == trace.changes


def test_lines_of_code_are_those_that_do_something(paths):
    text = (
        '"""What it is.\n\nMore."""\n\nimport os  # why\n\n# A comment.\n\n\n'
        'def f():\n    """Say."""\n    x = """a\n\nb"""\n    return (\n        x\n    )\n'
    )
    assert paths.code_lines(text) == 8
    assert paths.code_lines("") == 0
    core = paths.size("drivetrain", kit=True)
    assert 0 < core.files < core.code < core.lines
