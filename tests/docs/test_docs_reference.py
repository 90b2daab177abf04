"""The site builds, and the reference shows everything that is promised: what `tests/house/frozen` lists, word for word.

The frozen files are written without Sphinx, so that a mistake of the generator cannot hide itself.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import yaml

from drivetrain import errors

# The first of them builds the site: 15 s of a quiet core, 250 s on one that much else shares.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FROZEN = Path(__file__).parents[1] / "house/frozen"


def frozen(name):
    return (FROZEN / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def literal(text):
    """A default as a value, where it is one; the repr of an object is as good as any other."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return ...


def promised(line):
    """Names and defaults of the parameters of a frozen line; ``None`` for a property."""
    if "(" not in line.replace(" (abstract)", "").replace(" (read and write)", ""):
        return None
    # A default that is an object: its name or representation.
    objects = r"=(?!(?:None|True|False)[,)])(?:<[^>]*>|[A-Za-z_][\w.]*)(?=[,)])"
    text = re.sub(objects, "=...", line.replace(" (abstract)", ""))
    arguments = ast.parse(f"def {text}: ...").body[0].args
    arguments.args = [each for each in arguments.args if each.arg != "self"]
    return shown_parameters(ast.unparse(arguments))


def shown_parameters(text):
    """``a, *, b=1`` as pairs of a name and whether, and which, default it has."""
    arguments = ast.parse(f"def f({text}): ...").body[0].args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(positional, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    stars = [each.arg for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return [(each.arg, literal(ast.unparse(value)) if value else None) for each, value in pairs] + stars


def on_the_page(line):
    """The parameters of a signature of the site."""
    texts = [each.get_text() for each in line.find_all("em", class_="sig-param")]
    bare = [re.sub(r"^([*\w]+)\s*:.*?(=.*)?$", r"\1\2", text.replace("\n", " ")) for text in texts]
    return shown_parameters(", ".join(re.sub(r"=\s*<.*>$", "=...", each) for each in bare))


def test_the_site_builds_without_a_warning(site):
    assert site.complaints == ""


def test_every_source_leads_back_to_what_documents_it(site):
    lost, anchors = [], {}
    for file in sorted((site.folder / "_modules").rglob("*.html")):
        for href in re.findall(r'class="viewcode-back" href="([^"]+)"', file.read_text(encoding="utf-8")):
            page, _, anchor = href.partition("#")
            target = (file.parent / page).resolve()
            if target not in anchors:
                anchors[target] = set(re.findall(r'id="([^"]+)"', target.read_text(encoding="utf-8")))
            if anchor not in anchors[target]:
                lost.append(href)
    assert anchors
    assert not lost


@pytest.mark.parametrize("name", ["index", "how-to/planner", "tutorial/first-run"])
def test_every_page_says_what_to_type_instead_of_a_line_that_cannot_work_yet(site, name):
    announced = site.page(name).select_one(".announcement").get_text()
    assert "pip install --editable core --editable plugins/NAME" in announced


@pytest.mark.parametrize("line", frozen("hooks"), ids=lambda line: line.partition("(")[0])
def test_every_hook_is_shown_with_its_signature(site, line):
    name = line.partition("(")[0]
    found = site.signature("reference/hooks", f"drivetrain.hookspecs.{name}")
    assert on_the_page(found) == promised(line)
    assert len(found.find_next_sibling("dd").get_text()) > 80, f"{name} has no description"


def test_the_accelerator_is_shown_with_every_signature(site):
    lines = frozen("accelerator")
    found = site.signature("reference/accelerator", "drivetrain.Accelerator")
    assert on_the_page(found) == promised(lines[0])
    for line in lines[1:]:
        name = re.match(r"\w+", line).group()
        found = site.signature("reference/accelerator", f"drivetrain.Accelerator.{name}")
        if promised(line) is not None:
            assert on_the_page(found) == promised(line), name


PAGES = {
    "drivetrain": "accelerator",
    "drivetrain.api": "api",
    "drivetrain.api.accelerate": "api",
    "drivetrain.api.config": "api",
    "drivetrain.api.engines": "api",
    "drivetrain.api.programs": "api",
    "drivetrain_testing": "testing",
}


@pytest.mark.parametrize("module", PAGES)
def test_every_public_name_is_on_its_page(site, module):
    page = site.page(f"reference/{PAGES[module]}")
    shown = {each["id"] for each in page.find_all("dt", id=True)}
    named = {each.get_text() for each in page.find_all("code")}
    for line in frozen("public_names"):
        owner, _, name = line.rpartition(".")
        if owner == module and not name.startswith("__"):
            # Anchor of its own, the line "... is this class", a helper module, or a link to another page.
            assert line in shown or {line, name} & named, line


def test_every_error_is_shown_with_cause_and_cure(site):
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    assert len(kinds) > 15
    for kind in kinds:
        found = site.signature("reference/errors", f"drivetrain.errors.{kind.__name__}")
        assert on_the_page(found) == shown_parameters("what, *, whose='', cure=''")
        text = found.find_next_sibling("dd").get_text()
        if kind is not errors.DrivetrainError:
            assert re.search(r"^Cause: \w.*^Cure: \w", text, re.DOTALL | re.MULTILINE), kind


def test_every_configuration_key_is_shown_with_its_default_and_meaning(site):
    shown = {}
    for row in site.page("reference/configuration").select("tbody tr"):
        key, _, default, meaning = (cell.get_text() for cell in row.find_all("td"))
        shown[key] = (default, meaning)
    for line in frozen("config_keys"):
        key, _, value = line.partition(" = ")
        default, meaning = shown[key]
        assert len(meaning) > 10, f"{key} has no description"
        expected = literal(value)
        if expected is not ... and default != "must be given":
            assert yaml.safe_load(default) == (list(expected) if isinstance(expected, tuple) else expected), key


def test_every_command_and_flag_is_shown(site):
    texts = {}
    for section in site.page("reference/commands").select("section section"):
        texts[section.find("h2").find("code").get_text()] = section.find("pre").get_text()
    flags = [line.rpartition(" ") for line in frozen("cli_flags")]
    for command, _, names in flags:
        for name in names.split("/"):
            if name.startswith("-"):  # Else an argument, which stands in capitals.
                assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", texts[command]), f"{command} {name}"
            else:
                assert name.upper() in texts[command].partition("\n\n")[0], f"{command} {name}"
    assert set(texts) >= {command for command, _, _ in flags}
