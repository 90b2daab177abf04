"""A part of ``make test-accelerate``: Accelerate's own scripts under ``single`` and on two processes."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import suite

if find_spec("accelerate") is None:
    pytest.skip("Accelerate is not installed", allow_module_level=True)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("script", "place"),
    [("test_ops.py", "ddp-2"), ("test_script.py", "single"), ("test_script.py", "ddp-2"), ("test_sync.py", "single")],
)
def test_checks_of_accelerate_pass(script, place):
    found = suite.run(script, place)
    assert len(found) > 2
    assert [each.name for each in found if suite.kind(each) == "failed"] == []
    assert [each.name for each in found if each.waiver is not None and each.error is None] == []


def test_every_waiver_is_of_a_script_that_is_run():
    assert {each.script for each in suite.WAIVERS} <= suite.SCRIPTS.keys()
    assert not suite.NOT_RUN.keys() & suite.SCRIPTS.keys()
    folder = suite.renamed.folder() / "scripts"
    scripts = {path.relative_to(folder).as_posix() for path in folder.rglob("test_*.py")}
    assert scripts == suite.SCRIPTS.keys() | suite.NOT_RUN.keys()
