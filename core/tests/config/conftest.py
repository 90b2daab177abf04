"""Three backends that are not there: ``alpha`` with a section, ``beta`` without, ``gamma`` with one that is lenient."""

from __future__ import annotations

from typing import ClassVar, Literal

import pytest
from pydantic import BaseModel, Field

from drivetrain.backend import BackendInfo
from drivetrain.config import Section, load_config
from drivetrain.errors import BackendBrokenError, BackendNotFoundError


class Wrapping(Section):
    min_params: int = Field(0, ge=0, description="Smallest module that is wrapped.")


class Alpha(Section):
    reshard_after_forward: bool = Field(True, description="Free gathered parameters after each forward.")
    bucket_mb: float = Field(25.0, gt=0, description="Size of a bucket.")
    stage: Literal[1, 2, 3] = Field(2, description="How much is sharded.")
    hook: Literal["no", "fp16"] = Field("no", description="Compression.")
    offload: bool | Literal["auto"] = Field(False, description="Keep parameters on the host.")
    label: str | None = Field(None, description="A word.")
    options: dict[str, int] = Field(default_factory=dict, description="Anything else.")
    wrapping: Wrapping = Field(default_factory=Wrapping, description="What is wrapped.")


class Gamma(BaseModel):
    """Forgets to forbid unknown keys; pydantic would drop them."""

    depth: int = Field(1, description="How deep.")


class FakeRegistry:
    """Answers as :class:`drivetrain.registry.Registry` does."""

    aliases: ClassVar = {"multi_alpha": "alpha", "alpha": "alpha", "no": "beta", "beta": "beta", "gamma": "gamma"}
    sections: ClassVar = {"alpha": Alpha, "beta": None, "gamma": Gamma}

    def names(self):
        return ("alpha", "beta", "gamma")

    def resolve(self, name):
        if name.lower() == "broken":
            raise BackendBrokenError("plugin 'broken' could not be imported", whose="drivetrain-broken 1.0")
        if name.lower() not in self.aliases:
            cure = 'Run: pip install "drivetrain[delta]"' if name == "delta" else "`drivetrain backends` lists them."
            raise BackendNotFoundError(f"no installed backend is called {name!r}", cure=cure)
        return self.aliases[name.lower()]

    def info(self, name):
        name = self.resolve(name)
        return BackendInfo(name, "a test", "nowhere:Nothing", config="nowhere:Nothing" if self.sections[name] else None)

    def import_rules(self):
        return {"fsdp_config": {}}

    def load_section(self, info):
        return self.sections[info.name]


@pytest.fixture(scope="session")
def registry():
    return FakeRegistry()


@pytest.fixture(scope="session")
def alpha():
    return Alpha


@pytest.fixture(scope="session")
def gamma():
    return Gamma


@pytest.fixture
def load(tmp_path, monkeypatch, registry):
    """Load a text as the file ``c.yaml`` in an empty environment; positions then read ``c.yaml:3:1``."""
    monkeypatch.chdir(tmp_path)

    def run(text, environ=None, overrides=None):
        (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
        return load_config("c.yaml", environ=environ or {}, overrides=overrides, registry=registry)

    return run
