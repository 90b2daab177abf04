"""The site, built once for all tests of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup, Tag

ROOT = Path(__file__).resolve().parents[2]


class Site:
    """The pages that Sphinx wrote, parsed when they are asked for.

    Args:
        folder: where they are.
        complaints: what Sphinx printed; its exit code stands last when it is not 0.
    """

    def __init__(self, folder: Path, complaints: str) -> None:
        self.folder, self.complaints = folder, complaints
        self._pages: dict[str, BeautifulSoup] = {}

    def page(self, name: str) -> BeautifulSoup:
        if name not in self._pages:
            text = (self.folder / f"{name}.html").read_text(encoding="utf-8")
            self._pages[name] = BeautifulSoup(text, "html.parser")
        return self._pages[name]

    def signature(self, page: str, name: str) -> Tag:
        """The line that shows an object, as ``name(arguments) -> result``."""
        found = self.page(page).find("dt", id=name)
        assert found is not None, f"{name} is not on {page}"
        return found


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Built anew, without what an earlier build remembers, and with the backends of this environment."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "-n", "--keep-going", "-q", "-E", "-d", str(folder / "doctrees")]
    done = subprocess.run(
        [*command, "-b", "html", str(ROOT / "docs"), str(folder / "html")],
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    failed = f"exit code {done.returncode}" if done.returncode else ""
    return Site(folder / "html", done.stdout + done.stderr + failed)
