"""The command line as a user runs it: a fresh process, nothing on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyte
import pytest

Done = subprocess.CompletedProcess[str]
OURS = ("DRIVETRAIN_", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "OMP_")


@pytest.fixture
def drivetrain(tmp_path: Path) -> Callable[..., Done]:
    """``drivetrain("launch", "script.py")`` in an empty folder, with only the environment that is given."""

    def run(*arguments: object, answers: str = "", **environment: str) -> Done:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        return subprocess.run(
            [sys.executable, "-c", "from drivetrain.cli.main import main; main()", *map(str, arguments)],
            env={**clean, **environment},
            cwd=tmp_path,
            input=answers,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    return run


class Screen:
    """A command on a pseudo-terminal, with the screen that a person would see."""

    keys: ClassVar = {
        "up": "\x1b[A",
        "down": "\x1b[B",
        "enter": "\r",
        "space": " ",
        "backspace": "\x7f",
        "ctrl-c": "\x03",
    }
    patience = 90
    """Seconds, on a machine that does many other things."""

    def __init__(self, arguments: tuple[str, ...], folder: Path, environment: dict[str, str]) -> None:
        self._master, self._slave = pty.openpty()
        self._screen = pyte.Screen(100, 40)
        self._screen.write_process_input = lambda data: os.write(self._master, data.encode())  # where the cursor is
        self._stream = pyte.ByteStream(self._screen)
        self.resize(100, 40)
        self.settings_at_first = self.settings
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from drivetrain.cli.main import main; main()", *arguments],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            cwd=folder,
            env=environment,
            start_new_session=True,
            # So that it hears of a new size.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - one system call
        )

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    @property
    def settings(self) -> list[Any]:
        """Whether lines, echo and signals are the terminal's or the program's."""
        return termios.tcgetattr(self._slave)[:4]

    def resize(self, columns: int, lines: int) -> Screen:
        """As a person does with the mouse."""
        self._screen.resize(lines, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        return self

    def press(self, *keys: str) -> Screen:
        """Press keys, one after the other."""
        for key in keys:
            os.write(self._master, self.keys.get(key, key).encode())
        return self

    def wait_for(self, text: str) -> Screen:
        """Wait until something is on the screen."""
        end = time.monotonic() + self.patience
        while text not in self.text:
            assert time.monotonic() < end, f"{text!r} did not appear:\n{self.text}"
            if select.select([self._master], [], [], 0.2)[0]:
                self._stream.feed(os.read(self._master, 1 << 16))
        return self

    def exit_code(self) -> int:
        """Wait for the end."""
        return self.process.wait(self.patience)

    def close(self) -> None:
        """End what still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Screen]]:
    """``terminal("config")`` in an empty folder, on a machine without accelerators."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), "")
    screens: list[Screen] = []

    def start(*arguments: str) -> Screen:
        screens.append(Screen(arguments, tmp_path, {**clean, **hidden, "TERM": "xterm-256color"}))
        return screens[-1]

    yield start
    for screen in screens:
        screen.close()
