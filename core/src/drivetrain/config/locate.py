"""Read a YAML file into plain values, and remember the line and column of each key and each value.

Three readings of YAML 1.1 are changed, since they surprise people who write numbers: ``1e-3`` is a number (not text),
``2026-11-20`` is text (not a date), and so is ``1:30`` (not 90, a number to the base 60).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from drivetrain.config.origin import Origin

Path = tuple[str | int, ...]
"""Position of a value in the tree: mapping keys and list indices, outermost first."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: where, and a sentence that starts in lower case and carries no full stop.

    Args:
        origin: where.
        sentence: what is wrong.
        judged: a check of the model's own found it, which may have looked beyond the configuration: at a file.
    """

    origin: Origin
    sentence: str
    judged: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.origin}: {self.sentence}"


@dataclass
class Document:
    """A parsed file.

    Args:
        values: the tree of plain values.
        keys: where each key stands.
        places: where each value stands (for a value of a mapping: of the value, not of its key).
        problems: mistakes that do not stop the reading, such as a key written twice.
    """

    values: dict[str, Any] = field(default_factory=dict)
    keys: dict[Path, Origin] = field(default_factory=dict)
    places: dict[Path, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class _Loader(yaml.SafeLoader):
    """The safe loader with the three changes named above."""


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
    """Quotes what the loader would take for something else than text."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


def parse_scalar(text: str) -> Any:
    """Value of a YAML snippet, as it would be read after ``key:`` in a file. Raises ``yaml.YAMLError``."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of the safe loader


def write(value: Any) -> str:
    """``value`` on one line, so that :func:`locate` reads it back as it was."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("\n...\n").rstrip("\n")


def locate(text: str, source: str) -> Document:
    """Parse a whole file.

    Args:
        text: the file's content; nothing, or only comments, is an empty configuration.
        source: the file's name for positions.

    Returns:
        Values and positions. When the text is not YAML at all there are no values, and one problem says why.
    """
    document = Document()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None and not _is_null(node):
            _Walk(loader, source, document).root(node)
    except yaml.MarkedYAMLError as error:
        return Document(problems=[Problem(_marked(source, error), f"this is not valid YAML: {_reason(error)}")])
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        origin = Origin("file", source, before.count("\n") + 1, len(before) - before.rfind("\n"))
        return Document(problems=[Problem(origin, "this is not valid YAML: it holds a character that YAML forbids")])
    return document


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _origin(source: str, mark: Any) -> Origin:
    return Origin("file", source, mark.line + 1, mark.column + 1)


def _marked(source: str, error: yaml.MarkedYAMLError) -> Origin:
    mark = error.problem_mark or error.context_mark
    return _origin(source, mark) if mark is not None else Origin("file", source)


def _reason(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "unreadable"
    if "\\t" in problem:
        return "a tab cannot indent or start a value; use spaces"
    context = f"{error.context}, " if error.context else ""
    return f"{context}{problem}"


class _Walk:
    """Turn nodes into values, noting positions on the way."""

    def __init__(self, loader: _Loader, source: str, document: Document) -> None:
        self.loader, self.source, self.document = loader, source, document
        self.open: set[int] = set()

    def root(self, node: yaml.Node) -> None:
        if not isinstance(node, yaml.MappingNode):
            self._problem(node.start_mark, "a configuration is made of keys and values (key: value), this is not")
            return
        self.document.values = self._mapping(node, ())

    def _problem(self, mark: Any, sentence: str) -> None:
        self.document.problems.append(Problem(_origin(self.source, mark), sentence))

    def _value(self, node: yaml.Node, path: Path) -> Any:
        if id(node) in self.open:
            raise yaml.MarkedYAMLError(problem="an anchor contains itself", problem_mark=node.start_mark)
        self.document.places[path] = _origin(self.source, node.start_mark)
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN_TAGS:
                tag = node.tag.removeprefix("tag:yaml.org,2002:")
                raise yaml.MarkedYAMLError(problem=f"the tag '{tag}' has no meaning here", problem_mark=node.start_mark)
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
            return self._scalar(node)
        finally:
            self.open.discard(id(node))

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            return self.loader.construct_object(node)
        except ValueError as error:
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from error

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        self._report_duplicates(node)
        self.loader.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node.start_mark, "a key must be a word, not a list or a mapping")
                continue
            # The text as written: a key such as `no` is a word, whatever YAML 1.1 makes of it.
            key = str(key_node.value)
            self.document.keys[(*path, key)] = _origin(self.source, key_node.start_mark)
            result[key] = self._value(value_node, (*path, key))
        return result

    def _report_duplicates(self, node: yaml.MappingNode) -> None:
        first: dict[str, Any] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if key_node.value in first:
                line = first[key_node.value].line + 1
                self._problem(key_node.start_mark, f"key '{key_node.value}' was already given in line {line}")
            else:
                first[key_node.value] = key_node.start_mark
