"""A backend has one name in four places: distributed_type, entry point, config section and distribution."""

from __future__ import annotations

from drivetrain.config import load_config
from drivetrain.registry import get_registry


def test_a_plugin_is_named_once(plugin):
    name = plugin.folder.name
    assert plugin.project["name"] == f"drivetrain-{name}"
    if plugin.has_backend:
        points = plugin.project["entry-points"]
        assert points.pop("drivetrain") == {name: f"drivetrain_{name}.plugin"}
        assert set(points.pop("drivetrain.hooks", {}).values()) <= {f"drivetrain_{name}.plugin"}
        # What another distribution asks for.
        assert points.keys() <= {"drivetrain.estimates", "drivetrain.checkpoint_formats"}
        assert all(point.keys() == {name} for point in points.values())
    assert plugin.package.is_dir()


def test_a_plugin_brings_the_backend_of_its_name(engine):
    name = engine.folder.name
    registry = get_registry()
    info = registry.info(name)
    assert info.name == name
    assert registry.owner(name) == f"drivetrain-{name} {engine.project['version']}"
    assert info.backend.startswith(f"drivetrain_{name}.backend:")
    assert info.config is not None
    assert info.config.startswith(f"drivetrain_{name}.config:")


def test_the_section_of_its_name_is_its_own(engine, tmp_path):
    name = engine.folder.name
    file = tmp_path / "config.yaml"
    file.write_text(f"distributed_type: {name.upper()}\n{name}: {{}}\n", encoding="utf-8")
    resolved = load_config(file, environ={})
    assert resolved.config.distributed_type == name
    section = get_registry().load_section(get_registry().info(name))
    assert section is not None
    assert isinstance(resolved.validated_section(section), section)


def test_the_core_has_an_extra_of_its_name(plugin, core):
    name = plugin.folder.name
    extras = core.project["optional-dependencies"]
    if plugin.is_library:
        assert name not in extras
        return
    assert extras[name] == [f"drivetrain-{name}>=0.1,<0.2"]
    assert name in extras["all"][0].removeprefix("drivetrain[").removesuffix("]").split(",")


def test_every_backend_has_the_same_files(engine):
    for file in ("plugin.py", "config.py", "backend.py"):
        assert (engine.package / file).is_file(), file


def test_every_plugin_is_typed_tested_and_described(plugin):
    for file in ("py.typed", "__init__.py"):
        assert (plugin.package / file).is_file(), file
    for file in ("README.md", "LICENSE", "tests"):
        assert (plugin.folder / file).exists(), file


def test_make_setup_installs_every_plugin(plugin, root):
    lines = (root / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    assert f"-e ./plugins/{plugin.folder.name}" in lines


def test_a_plugin_asks_for_this_core(plugin, core):
    assert "drivetrain>=0.1,<0.2" in plugin.project["dependencies"]
    assert core.project["version"].startswith("0.1.")
    assert plugin.project["requires-python"] == core.project["requires-python"]


def test_the_version_is_written_once_more_and_the_same(core):
    import drivetrain

    assert drivetrain.__version__ == core.project["version"]


def test_there_is_exactly_one_console_script(house):
    scripts = {name: target for found in house for name, target in found.project.get("scripts", {}).items()}
    assert scripts == {"drivetrain": "drivetrain.cli.main:main"}


def test_the_reference_backend_is_found_as_every_other(core):
    assert core.project["entry-points"] == {"drivetrain": {"single": "drivetrain.backends.plugin"}}
    assert get_registry().info("single").backend.startswith("drivetrain.backends.single:")


def test_the_kit_is_a_distribution_for_this_core(core, house, root):
    (kit,) = [found for found in house if found.folder.name == "kit"]
    assert kit.project["name"] == "drivetrain-testing"
    assert kit.project["entry-points"] == {
        "drivetrain.hooks": {"commands": "drivetrain_testing.new_plugin"},
        "pytest11": {"drivetrain": "drivetrain_testing.options"},
    }
    assert "drivetrain>=0.1,<0.2" in kit.project["dependencies"]
    assert core.project["optional-dependencies"]["testing"] == ["drivetrain-testing>=0.1,<0.2"]
    assert kit.project["requires-python"] == core.project["requires-python"]
    assert "-e ./kit" in (root / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()


def test_no_backend_claims_the_name_of_a_core_key(house):
    from drivetrain.config.keys import CORE_KEYS

    assert not {found.folder.name for found in house} & CORE_KEYS
