"""What the reference says about the code, made from the code while the site is built, so that it cannot be out of date.

A page of `docs/reference/` holds a comment `<!-- generated: config -->`; :func:`expand` puts Markdown there. Signatures
and docstrings come from Sphinx's autodoc, which imports the real objects; configuration keys from the pydantic models
of the core and of every installed backend; commands from click.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from sphinx.util.nodes import get_node_source

from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from docutils.nodes import Element
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

MARK = re.compile(r"^<!-- generated: (\w+)(?: ([\w.]+))? -->$", flags=re.MULTILINE)
LINK_UP = re.compile(r"\[([^\]]+)\]\((\.\./[^)]+)\)")
HELP_WIDTH = 96
"""Columns of a help text: what a code block of the site holds without scrolling."""


def autodoc(directive: str, name: str, *options: str) -> str:
    """One object, documented by its own docstring."""
    body = "\n".join((f".. {directive}:: {name}", *(f"   {option}" for option in options)))
    return f"```{{eval-rst}}\n{body}\n```\n"


def api(module_name: str) -> Iterator[str]:
    """Every public name of a module; one that another page documents is named with a link to that page."""
    module = importlib.import_module(module_name)
    yield f"```{{eval-rst}}\n.. py:module:: {module_name}\n   :no-index-entry:\n```\n"
    elsewhere = []
    aliases_last = sorted(module.__all__, key=lambda name: (is_alias(name, getattr(module, name)), name.lower()))
    for name in aliases_last:
        value, full = getattr(module, name), f"{module_name}.{name}"
        if page := page_elsewhere(module_name, name, value):
            elsewhere.append(f"[`{name}`]({page})")
        elif is_alias(name, value):
            yield f"`{full}` is this class:\n"
            yield autodoc("autoclass", f"{value.__module__}.{value.__name__}", *member_options(value))
        elif inspect.isclass(value):
            yield autodoc("autoclass", full, *member_options(value))
        elif inspect.isroutine(value):
            yield autodoc("autofunction", full)
        elif inspect.ismodule(value):
            yield from helpers(value)
        elif not name.startswith("__"):
            shown = shown_in(full)
            yield f"```{{eval-rst}}\n.. py:data:: {full}\n   :value: {value!r}\n\n   {shown}\n```\n"
    if elsewhere:
        yield f"Documented on another page and importable from here too: {', '.join(elsewhere)}.\n"


BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```python\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
MOST_PAGES = 3
"""Pages that a name is linked to."""


@functools.cache
def programs() -> dict[str, tuple[str, str]]:
    """Return title and Python of each page whose programs run, by the page's name."""
    root, found = Path(__file__).parents[1], {}
    for path in sorted(root.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        code = "\n".join(body for note, body in BLOCK.findall(text) if not note.startswith("not run"))
        if code:
            found[path.relative_to(root).with_suffix("").as_posix()] = (text.partition("\n")[0].strip("# "), code)
    return found


def shown_in(full: str) -> str:
    """Return a sentence with links to the pages whose programs use a public name, most uses first; empty without one.

    Args:
        full: ``drivetrain.Accelerator.gather``, ``drivetrain.EMA``, ``drivetrain.api.Backend``.
    """
    owner, _, name = full.rpartition(".")
    before = r"\baccelerator\." if owner == "drivetrain.Accelerator" else r"(?<![\w.])"
    pattern = re.compile(rf"{before}{name}\b")
    uses = {page: len(pattern.findall(code)) for page, (_, code) in programs().items()}
    pages = sorted(filter(uses.get, uses), key=lambda page: (page.startswith("reference/"), -uses[page]))
    links = (f":doc:`{programs()[page][0].replace('`', '')} </{page}>`" for page in pages[:MOST_PAGES])
    return f"Shown in {', '.join(links)}." if pages else ""


@functools.cache
def public_names() -> dict[str, str]:
    """Return the public name of each object that autodoc documents under another one, by that one."""
    import drivetrain

    values = ((name, getattr(drivetrain, name)) for name in drivetrain.__all__)
    aliases = {name: value for name, value in values if is_alias(name, value)}
    return {f"{value.__module__}.{value.__name__}": f"drivetrain.{name}" for name, value in aliases.items()}


def add_programs(_app: Sphinx, _what: str, name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Add to a docstring the pages that show the name."""
    full = public_names().get(name, name)
    owner = full.rpartition(".")[0]
    if (owner in {"drivetrain", "drivetrain.Accelerator"} or owner.startswith("drivetrain.api")) and shown_in(full):
        lines += ["", shown_in(full), ""]


def is_alias(name: str, value: Any) -> bool:
    """Whether a class is public under another name than its own."""
    return inspect.isclass(value) and value.__name__ != name


def page_elsewhere(module_name: str, name: str, value: Any) -> str:
    """The page that documents a public name in another place, or nothing."""
    import drivetrain

    if inspect.isclass(value) and issubclass(value, DrivetrainError) and value.__module__ == DrivetrainError.__module__:
        return "errors.md"
    return "accelerator.md" if module_name != "drivetrain" and name in drivetrain.__all__ else ""


def member_options(kind: type) -> list[str]:
    """Members of ours, inherited ones too; what torch or the standard library defines has its own documents."""
    foreign = [base.__name__ for base in kind.__mro__ if not base.__module__.startswith("drivetrain")]
    return [":members:", f":inherited-members: {', '.join(foreign)}", ":member-order: bysource"]


def helpers(module: types.ModuleType) -> Iterator[str]:
    """The public functions of a module that `drivetrain.api` hands out whole."""
    purpose = (module.__doc__ or "").partition("\n")[0].replace("``", "`")
    yield f"`{module.__name__.rpartition('.')[2]}` (`{module.__name__}`): {purpose}\n"
    for name, value in sorted(vars(module).items()):
        own = getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
        if own and inspect.isclass(value):
            yield autodoc("autoclass", f"{module.__name__}.{name}", *member_options(value))
        elif own and inspect.isfunction(value):
            yield autodoc("autofunction", f"{module.__name__}.{name}")


def hooks() -> Iterator[str]:
    """Every hook, in the order of the file."""
    from drivetrain import hookspecs

    for name, value in vars(hookspecs).items():
        if name.startswith("drivetrain_") and inspect.isfunction(value):
            yield autodoc("autofunction", f"drivetrain.hookspecs.{name}")


def errors() -> Iterator[str]:
    """Every error class, with its bases."""
    from drivetrain import errors as module

    for name, value in vars(module).items():
        if inspect.isclass(value) and issubclass(value, DrivetrainError):
            yield autodoc("autoclass", f"{module.__name__}.{name}", ":show-inheritance:")


def config() -> Iterator[str]:
    """The core's keys, then one section for each installed backend."""
    from drivetrain.config.schema import Config
    from drivetrain.registry import get_registry

    yield "## Keys of the core\n"
    yield key_table(Config)
    registry = get_registry()
    for name in registry.names():
        section = registry.load_section(registry.info(name))
        if section is not None and section.model_fields:
            yield f"## `{name}:`\n\n{summary(section)}\n"
            yield key_table(section, f"{name}.")


def key_table(model: type[BaseModel], prefix: str = "") -> str:
    """A table of keys: name, type, default, meaning."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|", *key_rows(model, prefix)]
    return "\n".join(rows) + "\n"


def key_rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """One row a key, those of nested models after their own row."""
    for name, field in model.model_fields.items():
        key, kind = prefix + (field.alias or name), field.annotation
        if inspect.isclass(kind) and issubclass(kind, BaseModel):
            yield f"| `{key}` | section | | {cell(field.description or summary(kind))} |"
            yield from key_rows(kind, f"{key}.")
        else:
            cells = (kind_text(kind), default_text(field), field.description or "")
            yield f"| `{key}` | {' | '.join(cell(each) for each in cells)} |"


def summary(kind: type) -> str:
    """The first paragraph of a docstring on one line."""
    return (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")


def cell(text: str) -> str:
    """Text that may stand in a table, and whose underscores and stars mean themselves."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()).replace("|", "\\|"))
    return "".join(part if part.startswith("`") else re.sub(r"([*_<])", r"\\\1", part) for part in parts)


def kind_text(kind: Any) -> str:
    """A type as people write it into YAML."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is type(None):
        return "null"
    if origin is Annotated:
        return kind_text(inner[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in {Union, types.UnionType}:
        return " or ".join(kind_text(each) for each in inner)
    if origin in {list, tuple, set, frozenset}:
        return f"list of {kind_text(inner[0])}"
    if origin is not None and len(inner) == 2:
        return f"{kind_text(inner[0])} to {kind_text(inner[1])}"
    words = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "anything"}
    return words.get(kind) or str(getattr(kind, "__name__", kind))


def default_text(field: FieldInfo) -> str:
    """A default as it stands in YAML."""
    from drivetrain.config.locate import write

    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "must be given"
    return f"`{write(list(value) if isinstance(value, tuple) else value).strip()}`"


def commands() -> Iterator[str]:
    """Every command with what `--help` prints, those of installed plugins too."""
    from drivetrain.cli.main import drivetrain

    yield from command(drivetrain, "drivetrain", None)


def command(each: click.Command, path: str, parent: click.Context | None) -> Iterator[str]:
    """One command and those below it."""
    context = click.Context(each, info_name=path.rpartition(" ")[2], parent=parent, max_content_width=HELP_WIDTH)
    context.terminal_width = HELP_WIDTH
    yield f"## `{path}`\n\n```text\n{each.get_help(context)}\n```\n"
    if isinstance(each, click.Group):
        for name in each.list_commands(context):
            child = each.get_command(context, name)
            if child is not None and not child.hidden:
                yield from command(child, f"{path} {name}", context)


def changes() -> Iterator[str]:
    """Return what is new: the fragments that the next release will collect, then the releases so far."""
    root = Path(__file__).parents[2]
    release = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["towncrier"]
    yield f"## Not released yet: {release['version']}\n"
    for kind in release["type"]:
        files = sorted((root / release["directory"]).glob(f"*.{kind['directory']}.md"))
        texts = (" ".join(file.read_text(encoding="utf-8").split()) for file in files)
        if files:
            yield f"### {kind['name']}\n"
            yield "\n".join(f"- {text}" for text in texts) + "\n"
    yield (root / release["filename"]).read_text(encoding="utf-8").partition(release["start_string"])[2]


MAKERS: dict[str, Callable[..., Iterator[str]]] = {
    "api": api,
    "hooks": hooks,
    "errors": errors,
    "config": config,
    "commands": commands,
    "changes": changes,
}


def made(match: re.Match[str]) -> str:
    """What stands in the place of one mark."""
    name, argument = match.groups()
    if name not in MAKERS:
        raise ValueError(f"{match.group()} names nothing that can be generated; there are: {', '.join(MAKERS)}")
    return "\n".join(MAKERS[name](*([argument] if argument else [])))


def outside_as_text(text: str, page: Path, root: Path) -> str:
    """Turn links that lead out of `docs/` into the name of the file: in a clone they work, a site has no such page."""

    def replaced(match: re.Match[str]) -> str:
        label, target = match.groups()
        path = (page.parent / target.partition("#")[0]).resolve()
        return match.group() if path.is_relative_to(root) else f"{label} (`{path.relative_to(root.parent).as_posix()}`)"

    return LINK_UP.sub(replaced, text)


def expand(app: Sphinx, name: str, source: list[str]) -> None:
    """Prepare a page as Sphinx reads it."""
    page = Path(app.env.doc2path(name))
    source[0] = MARK.sub(made, outside_as_text(source[0], page, Path(app.srcdir)))


def text_for_others(_app: Sphinx, _env: BuildEnvironment, node: pending_xref, content: Element) -> Element | None:
    """Show a reference to what has no page here (internals, torch, the standard library) as text.

    One that leads nowhere stays an error.
    """
    role = "refwarn" in node  # Else an annotation, which the interpreter and mypy have read already.
    return content if not role or any(map(exists, meanings(node))) else None


def meanings(node: pending_xref) -> Iterator[str]:
    """The full names that a reference may mean: as it is, or from the docstring where it stands, outwards."""
    target = node["reftarget"]
    yield from (target, f"builtins.{target}", f"drivetrain.errors.{target}")
    place = (get_node_source(node) or "").partition("docstring of ")[2]
    while place:
        yield f"{place}.{target}"
        place = place.rpartition(".")[0]


def exists(target: str) -> bool:
    """Whether a dotted name leads to an object."""
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError):
        return False
    return True


BACK = re.compile(r'(?<=class="viewcode-back" href=")([^"#]+)#([^"]+)')
"""A link from the source of an object to its documentation: page, and anchor."""


def lead_back(app: Sphinx, page: str, _template: str, context: dict[str, Any], _doctree: object) -> None:
    """Correct links from a source file to the reference: Sphinx expects names of one public module in a file."""
    if not page.startswith("_modules/"):
        return
    pages: dict[str, list[str]] = {}
    for _, _, _, name, anchor, _ in app.env.get_domain("py").get_objects():
        pages.setdefault(app.builder.get_relative_uri(page, name), []).append(anchor)

    def corrected(match: re.Match[str]) -> str:
        target, anchor = match.groups()
        anchors = pages.get(target, [])
        names = anchor.split(".")
        for start in range(len(names)):
            tail = ".".join(names[start:])
            found = [each for each in anchors if each == tail or each.endswith(f".{tail}")]
            if found:
                return f"{target}#{anchor if anchor in found else found[0]}"
        return match.group()

    context["body"] = BACK.sub(corrected, context.get("body", ""))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", expand)
    app.connect("autodoc-process-docstring", add_programs)
    app.connect("missing-reference", text_for_others)
    app.connect("html-page-context", lead_back)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
