"""Parses YAML into plain values, with the line and column of each key and value.

Three readings of YAML 1.1 are changed, since they surprise people who write numbers: ``1e-3`` is a number (not text),
``2026-11-20`` is text (not a date), and so is ``1:30`` (not 90, a number to the base 60).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Literal

import yaml

from drivetrain.errors import ConfigError
from drivetrain.wording import cut

# ---- Origins of values

@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """Source of one value.

    Args:
        kind: the layer.
        source: the file's name, the environment variable or the flag; empty for a default.
        line: line in the file, from 1; 0 when the source has no lines.
        column: column in that line, from 1; 0 when the source has no lines.
    """

    kind: Literal["default", "file", "environment", "flag"]
    source: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        """``default``, ``train.yaml:3:18``, ``environment variable DRIVETRAIN_DEBUG`` or ``flag --debug``."""
        if self.kind == "default":
            return "default"
        if self.kind == "file":
            return f"{self.source}:{self.line}:{self.column}" if self.line else self.source
        return f"environment variable {self.source}" if self.kind == "environment" else f"flag {self.source}"


DEFAULT = Origin("default")

Path = tuple[str | int, ...]
"""Position of a value in the tree: mapping keys and list indices, outermost first."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: where, and a sentence that starts in lower case and carries no full stop.

    Args:
        origin: where.
        sentence: what is wrong.
        judged: a validator of the model itself found it, which may have read a file.
    """

    origin: Origin
    sentence: str
    judged: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.origin}: {self.sentence}"


@dataclass
class Tree:
    """Values with the places where they were written.

    Args:
        values: nested plain values.
        origins: where each value, and each mapping on the way to it, came from.
        keys: where each key of a file stands.
        problems: mistakes that do not stop the reading, such as a key written twice.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, Origin] = field(default_factory=dict)
    keys: dict[Path, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def put(self, path: Path, value: Any, origin: Origin) -> None:
        """Set one value; a value on the path of a nested key is replaced by a mapping."""
        here = self.values
        for depth, key in enumerate(path[:-1], start=1):
            below = here.get(str(key))
            if not isinstance(below, dict):
                below = here[str(key)] = {}
            self.origins.setdefault(path[:depth], origin)
            here = below
        for old in [each for each in self.origins if each[: len(path)] == path]:
            del self.origins[old]
        here[str(path[-1])] = value
        self.origins[path] = origin

    def origin(self, path: Path) -> Origin:
        """Return the origin of the value at this path, or of the value that contains it."""
        held = (path[:length] for length in range(len(path), 0, -1))
        return next((self.origins[each] for each in held if each in self.origins), DEFAULT)

    def key(self, path: Path) -> Origin:
        """Return the position of the key at this path in a file; else as :meth:`origin`."""
        return self.keys.get(path) or self.origin(path)


# ---- Parsing YAML

MAX_VALUES = 10_000
"""Keys and values of one file, counted where an alias repeats them too. DeepSpeed's longest files hold about 200; a
tensor-parallel plan that names each layer of a model with 100 of them holds about 1,500."""

MAX_BYTES = 500_000
"""Maximum size of a file; parsing it takes half a second."""

MAX_DEPTH = 50
"""Mappings and lists inside each other."""

_NEITHER_PATH_NOR_TEXT = re.compile("[\0\ud800-\udfff]")
"""NUL and halves of surrogate pairs, which YAML lets a file write as ``"\\0"`` and ``"\\ud800"``."""

_LARGEST_NUMBER = 10**300
"""Larger integers exceed ``float``, and Python does not print those of 4,300 digits."""


class _Loader(yaml.SafeLoader):
    """The safe loader with the three changes named above, and with a limit on the size of the text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._nodes += 1
        self._depth += 1
        _refuse_size(self._nodes, self._depth, mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _refuse_size(values: int, depth: int, mark: Any) -> None:
    """Raise ``yaml.MarkedYAMLError`` for more values than a configuration can have."""
    if values > MAX_VALUES:
        sentence = f"there are more than {MAX_VALUES:,} keys and values, counting what an alias (*name) repeats"
        raise yaml.MarkedYAMLError(problem=sentence, problem_mark=mark)
    if depth > MAX_DEPTH:
        raise yaml.MarkedYAMLError(problem=f"it is nested more than {MAX_DEPTH} levels deep", problem_mark=mark)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("timestamp", "int")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(?:0b[0-1_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loader would read as another type."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # PyYAML's other styles break lines at these characters, and read some of them back as a space.
    style = '"' if any(each in "\n\r\x85\u2028\u2029" for each in text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)

_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_MERGE_TAG = "tag:yaml.org,2002:merge"


def parse_scalar(text: str) -> Any:
    """Value of a YAML snippet, as it would be read after ``key:`` in a file. Raises ``yaml.YAMLError``."""
    loader, tree = _Loader(text), Tree()
    node = loader.get_single_node()
    value = None if node is None else _Walk(loader, "", tree).value(node, ())
    if tree.problems:
        raise yaml.YAMLError(tree.problems[0].sentence)
    return value


def write(value: Any) -> str:
    """``value`` on one line, so that :func:`locate` reads it back as it was."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("\n...\n").rstrip("\n")


def read_file(path: str | os.PathLike[str]) -> str:
    """The text of a configuration file.

    Raises:
        ConfigError: there is no such file, it cannot be read, or it is larger than :data:`MAX_BYTES`.
    """
    name = os.fspath(path)
    try:
        with FilePath(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no configuration file {name!r}",
            cure="Write one with `drivetrain config --default`, or correct the path.",
        ) from error
    except (OSError, ValueError) as error:  # ValueError: bytes that are no UTF-8, or a NUL in the path
        raise ConfigError(
            f"the configuration file {name!r} cannot be read: {error}",
            cure="Name a file of YAML in UTF-8 that this user may read; `drivetrain config --default` writes one.",
        ) from error
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"the configuration file {name!r} is larger than {MAX_BYTES:,} bytes",
            cure="Name the YAML file of the configuration; one with every key written out has about 10,000.",
        )
    return text


def locate(text: str, source: str) -> Tree:
    """Parse a file.

    Args:
        text: the file's content; nothing, or only comments, is an empty configuration.
        source: the file's name for positions.

    Returns:
        Values and positions. When the text is not YAML at all there are no values, and one problem says why.
    """
    tree = Tree()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None and node.tag != "tag:yaml.org,2002:null":
            _Walk(loader, source, tree).root(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        origin = Origin("file", source) if mark is None else _origin(source, mark)
        return Tree(problems=[Problem(origin, f"this is not valid YAML: {_reason(error)}")])
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        origin = Origin("file", source, before.count("\n") + 1, len(before) - before.rfind("\n"))
        return Tree(problems=[Problem(origin, "this is not valid YAML: it holds a character that YAML forbids")])
    return tree


def _origin(source: str, mark: Any) -> Origin:
    return Origin("file", source, mark.line + 1, mark.column + 1)


def _reason(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "unreadable"
    if "\\t" in problem:
        return "a tab cannot indent or start a value; use spaces"
    context = f"{error.context}, " if error.context else ""
    return f"{context}{problem}"


class _Walk:
    """Converts nodes to values and records their positions.

    An alias stands for the same node once more, so values are counted here again: a few lines of aliases of aliases
    can stand for billions of values.
    """

    def __init__(self, loader: _Loader, source: str, tree: Tree) -> None:
        self.loader, self.source, self.tree = loader, source, tree
        self.open: set[int] = set()
        self.values = 0

    def root(self, node: yaml.Node) -> None:
        if not isinstance(node, yaml.MappingNode):
            self._problem(node.start_mark, "a configuration is made of keys and values (key: value), this is not")
            return
        self.tree.values = self.value(node, ())

    def value(self, node: yaml.Node, path: Path) -> Any:
        """Return the value of the node at ``path``."""
        self._count(node, len(path))
        self.tree.origins[path] = _origin(self.source, node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if node.tag not in _PLAIN_TAGS:
            raise _unknown_tag(node)
        with self._opened(node):
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]

    def _problem(self, mark: Any, sentence: str) -> None:
        self.tree.problems.append(Problem(_origin(self.source, mark), sentence))

    def _count(self, node: yaml.Node, depth: int) -> None:
        self.values += 1
        _refuse_size(self.values, depth, node.start_mark)

    @contextmanager
    def _opened(self, node: yaml.Node) -> Iterator[None]:
        """Refuse a node that contains itself."""
        if id(node) in self.open:
            raise yaml.MarkedYAMLError(problem="an anchor contains itself", problem_mark=node.start_mark)
        self.open.add(id(node))
        yield
        self.open.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            value = self.loader.construct_object(node)
        except yaml.YAMLError:
            raise
        except Exception as error:  # the loader's constructors raise whatever int(), a dictionary or a regex raises
            tag = node.tag.removeprefix("tag:yaml.org,2002:")
            raise yaml.MarkedYAMLError(
                problem=f"{cut(node.value, 60)!r} cannot be read as '{tag}'", problem_mark=node.start_mark
            ) from error
        if isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
            raise yaml.MarkedYAMLError(
                problem=f"this number of {len(node.value):,} digits is too large", problem_mark=node.start_mark
            )
        if isinstance(value, str) and (wrong := _NEITHER_PATH_NOR_TEXT.search(value)):
            sentence = f"it holds the character U+{ord(wrong[0]):04X}, which neither a path nor a name can hold"
            raise yaml.MarkedYAMLError(problem=sentence, problem_mark=node.start_mark)
        if not isinstance(value, (str, int, float, type(None))):  # a date, bytes: types that no key has
            raise _unknown_tag(node)
        return value

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, (key_node, value_node) in self._pairs(node, len(path)).items():
            self.tree.keys[(*path, key)] = _origin(self.source, key_node.start_mark)
            result[key] = self.value(value_node, (*path, key))
        return result

    def _pairs(self, node: yaml.MappingNode, depth: int) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Keys of a mapping with their nodes. Keys merged by ``<<`` come first, and explicit ones override them."""
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node.start_mark, "a key must be a word, not a list or a mapping")
            elif key_node.tag == _MERGE_TAG:
                merged = self._merged(value_node, depth + 1) | merged
            elif not key_node.value.isprintable():
                self._problem(key_node.start_mark, "a key must be a word, without characters that cannot be shown")
            else:
                # The text as written: a key such as `no` is text, not YAML 1.1's boolean.
                key = str(key_node.value)
                if key in own:
                    line = own[key][0].start_mark.line + 1
                    self._problem(key_node.start_mark, f"key '{cut(key, 60)}' was already given in line {line}")
                own[key] = (key_node, value_node)
        return merged | own

    def _merged(self, node: yaml.Node, depth: int) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """The keys merged by ``<<: node``; the first of several mappings that has a key wins."""
        self._count(node, depth)
        with self._opened(node):
            if isinstance(node, yaml.MappingNode):
                pairs = self._pairs(node, depth)
                self.values += len(pairs)
                return pairs
            if isinstance(node, yaml.SequenceNode) and all(isinstance(each, yaml.MappingNode) for each in node.value):
                found: dict[str, tuple[yaml.Node, yaml.Node]] = {}
                for each in node.value:
                    found = self._merged(each, depth + 1) | found
                return found
        raise yaml.MarkedYAMLError(
            problem="<< merges keys and values, or a list of such; this is neither", problem_mark=node.start_mark
        )


def _unknown_tag(node: yaml.Node) -> yaml.MarkedYAMLError:
    tag = node.tag.removeprefix("tag:yaml.org,2002:")
    return yaml.MarkedYAMLError(problem=f"the tag '{tag}' has no meaning here", problem_mark=node.start_mark)

