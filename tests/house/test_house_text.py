"""Rules about the text of source files: no machine paths, no backend named in the core, no silent `except`."""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess

import pytest

BACKENDS = {"dp", "ddp", "fsdp", "deepspeed", "megatron", "xla"}

# In pieces, so that this file does not hold what it looks for.
MACHINE = ["/" + "work/", "/" + "root/", "/" + "opt/", "/tmp/" + "brief", "py" + "pi.org", "download.py" + "torch.org"]


@pytest.fixture(scope="module")
def texts(root):
    """Every text file that belongs to the repository, by relative path."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {}
    for name in names:
        path = root / name
        if path.suffix in {".py", ".toml", ".md", ".txt", ".yaml", ".yml", ".json", ".cfg", ""} and path.is_file():
            found[name] = path.read_text(encoding="utf-8")
    assert "pyproject.toml" in found
    return found


def sources(texts):
    return {name: text for name, text in texts.items() if name.endswith(".py") and "/src/" in name}


def test_no_path_of_anybodys_machine(texts):
    found = [(name, word) for name, text in texts.items() for word in MACHINE if word in text]
    assert found == []


def test_every_page_is_in_the_list_of_pages(texts):
    """Else the site is not built: Sphinx warns of a page without a place, and its warnings are errors there."""
    pages = {name.removeprefix("docs/").removesuffix(".md") for name in texts if re.fullmatch(r"docs/.*\.md", name)}
    listed = {"index"}
    for name in pages:
        folder = name.rpartition("/")[0]
        for block in re.findall(r"```\{toctree\}\n(.*?)```", texts[f"docs/{name}.md"], re.DOTALL):
            for line in block.splitlines():
                entry = f"{folder}/{line}".lstrip("/")
                listed |= set(fnmatch.filter(pages, entry)) if line and not line.startswith(":") else set()
    assert sorted(pages - listed) == []


def test_nothing_is_left_to_do(texts):
    mark = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    found = [name for name, text in sources(texts).items() if mark.search(text)]
    assert found == []


def test_the_core_names_no_backend(texts):
    found = []
    for name, text in sources(texts).items():
        if name.startswith("core/"):
            found += [
                f"{name}:{node.lineno} {node.value!r}"
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.lower() in BACKENDS
            ]
    assert found == []


def test_no_exception_is_swallowed_without_a_reason(texts):
    found = []
    for name, text in sources(texts).items():
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ExceptHandler) and all(isinstance(step, ast.Pass) for step in node.body):
                span = lines[node.lineno - 1 : node.body[-1].end_lineno]
                if not any("#" in line for line in span):
                    found.append(f"{name}:{node.lineno}")
    assert found == []


def test_no_package_at_the_level_of_distributions(root):
    for folder in ("core", "plugins", "tests", "tests/house", "core/tests"):
        assert not (root / folder / "__init__.py").exists(), folder


def test_test_files_have_names_of_their_own(texts):
    names = [name.rsplit("/", 1)[-1] for name in texts if re.search(r"(^|/)test_[^/]*\.py$", name)]
    assert sorted({name for name in names if names.count(name) > 1}) == []


NO_FIRST_WORD = {"What", "Who", "Whose", "Which", "Of", "How"}


def docstrings(tree):
    """Line and text of the docstrings of a module, of its classes and functions, and of constants."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in node.body:
                value = getattr(statement, "value", None)
                if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield statement.lineno, value.value


def test_a_docstring_begins_with_a_verb_or_a_noun(texts):
    """As in PyTorch's documentation: "Return the norm", "Norm of the gradients", and not "What the norm is"."""
    found = [
        f"{name}:{line}: {text.strip().splitlines()[0]}"
        for name, source in sources(texts).items()
        for line, text in docstrings(ast.parse(source))
        if text.split() and text.split()[0] in NO_FIRST_WORD
    ]
    assert not found, "\n".join(found)


COMPOSED = {
    "core/src/drivetrain/config/resolved.py: ConfigError('\\n'.join([*lines, f'{count} in the configuration']))",
    "core/src/drivetrain/launch/coordinator.py: LaunchError(self._state.over)",
    "core/src/drivetrain/launch/notebook.py: LaunchError(''.join(words).rstrip())",
}
"""Errors whose text comes from elsewhere, with what to do."""


def errors_of_ours():
    """Names of our classes of errors without a cure of their own: who raises one says what to do."""
    from drivetrain import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return {kind.__name__ for kind in kinds if issubclass(kind, errors.DrivetrainError) and not kind.usual_cure}


def test_every_error_says_what_to_do(house, root):
    """A sentence that only says what is wrong leaves the reader where they were."""
    ours, silent = errors_of_ours(), []
    for path in (path for each in house for path in each.sources):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ours):
                continue
            place = f"{path.relative_to(root)}: {ast.unparse(node)}"
            if not {"cure", None} & {each.arg for each in node.keywords} and place not in COMPOSED:
                silent.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)[:100]}")
    assert not silent, "give them cure=:\n" + "\n".join(silent)
