"""`make bench` in small: it runs and prints a table. How fast anything is, is not asked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_quick_run_prints_a_table_of_every_group(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--quick", "--here"]
    written = [tmp_path / "rows.json", tmp_path / "tables.md"]
    options = ["--json", str(written[0]), "--markdown", str(written[1])]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    sections = json.loads(written[0].read_text())["sections"]
    titles = [section["title"] for section in sections]
    for word in ("Training step", "Loading", "gather_for_metrics", "save_state", "load_state", "--help", "Import"):
        assert any(word in title for title in titles), f"{word} is not among {titles}"
    for section in sections:
        ours = [row for row in section["rows"] if "drivetrain" in row["name"]]
        assert len(ours) == 1, section["title"]
        assert section["title"] in done.stdout
        assert section["title"] in written[1].read_text()


def test_a_group_that_does_not_exist_is_named():
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--here", "stepz"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "stepz" in done.stderr
    assert "steps" in done.stderr
