"""DeepSpeed's JSON file, read with the line of each key. No torch, no engine.

DeepSpeed reads more than JSON: comments (``//``, ``#``, ``/* */``) and a comma before a closing bracket are common in
its files, so they pass here too. A key given twice is a mistake in both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

Keys = tuple[str, ...]
"""The way to a value, from the outside in."""

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|\#[^\n]*|/\*.*?\*/)
      | (?P<mark>[{}\[\]:,])
      | (?P<text>"(?:[^"\\\n]|\\.)*")
      | (?P<word>[^\s{}\[\]:,"\#]+)""",
    re.VERBOSE | re.DOTALL,
)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class JsonFile:
    """Content of a file, with line numbers.

    Args:
        path: as the user wrote it.
        values: the file's mapping.
        lines: line, from 1, of each key on the way to each value.
    """

    path: str
    values: dict[str, Any]
    lines: Mapping[Keys, int] = field(default_factory=dict)

    def where(self, keys: Keys) -> str:
        """``ds.json:12``, of this key or of the nearest one that holds it."""
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.lines:
                return f"{self.path}:{self.lines[keys[:length]]}"
        return self.path


def read_json(path: str) -> JsonFile:
    """Read a file.

    Raises:
        ValueError: there is no such file, or it is not JSON; names file and line.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"there is no file {path!r} in {Path.cwd()}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file {path!r} cannot be read: {error}") from error
    parser = _Parser(text, path)
    return JsonFile(path, parser.whole(), parser.lines)


@final
class _Parser:
    """One pass over the tokens of one text."""

    def __init__(self, text: str, path: str) -> None:
        self.path, self.lines = path, dict[Keys, int]()
        self._line = 1
        self._tokens = list(self._split(text))
        self._next = 0

    def whole(self) -> dict[str, Any]:
        """The mapping that the text is. Raises ``ValueError``."""
        if self._peek() != "{":
            raise self._wrong("expected keys and values in braces")
        values = self._mapping(())
        if self._peek():
            raise self._wrong(f"{self._peek()!r} stands after the end")
        return values

    def _split(self, text: str) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        at, line = 0, 1
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                self._line = line
                raise self._wrong(f"{text[at]!r} begins nothing that JSON knows")
            if match.lastgroup != "skip":
                found.append((match.group(), line))
            line += match.group().count("\n")
            at = match.end()
        return [*found, ("", line)]

    def _peek(self) -> str:
        piece, self._line = self._tokens[self._next]
        return piece

    def _take(self) -> str:
        piece = self._peek()
        self._next += piece != ""
        return piece

    def _expect(self, mark: str) -> None:
        if self._peek() != mark:
            raise self._wrong(f"expected {mark!r}, not {self._peek() or 'the end'!r}")
        self._take()

    def _wrong(self, sentence: str) -> ValueError:
        return ValueError(f"{self.path}:{self._line}: this is not JSON: {sentence}")

    def _mapping(self, above: Keys) -> dict[str, Any]:
        values: dict[str, Any] = {}
        self._expect("{")
        while self._peek() != "}":
            if not self._peek().startswith('"'):
                raise self._wrong(f"expected a key in double quotes, not {self._peek() or 'the end'!r}")
            key, line = str(self._text(self._take())), self._line
            keys = (*above, key)
            if key in values:
                self._line = line
                raise self._wrong(f"the key {key!r} was already given in line {self.lines[keys]}")
            self.lines[keys] = line
            self._expect(":")
            values[key] = self._value(keys)
            self._comma("}")
        self._expect("}")
        return values

    def _comma(self, end: str) -> None:
        if self._peek() != end:
            self._expect(",")

    def _value(self, keys: Keys) -> Any:
        piece = self._peek()
        if piece == "{":
            return self._mapping(keys)
        if piece == "[":
            return self._list(keys)
        if piece.startswith('"'):
            return self._text(self._take())
        if piece in _WORDS:
            return _WORDS[self._take()]
        if _NUMBER.fullmatch(piece):
            self._take()
            return int(piece) if piece.lstrip("+-").isdigit() else float(piece)
        raise self._wrong(f"expected a value, not {piece or 'the end'!r}")

    def _list(self, keys: Keys) -> list[Any]:
        values: list[Any] = []
        self._expect("[")
        while self._peek() != "]":
            values.append(self._value(keys))
            self._comma("]")
        self._expect("]")
        return values

    def _text(self, piece: str) -> Any:
        try:
            return json.loads(piece, strict=False)
        except json.JSONDecodeError as error:
            raise self._wrong(error.msg) from error
