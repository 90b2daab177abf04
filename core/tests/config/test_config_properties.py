"""What holds for any configuration: round trips and precedence."""

from __future__ import annotations

import string
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.config import Config, ResolvedConfig, load_config
from drivetrain.config.locate import locate, write

# Of all characters, NUL alone is refused: neither a path nor a name can hold it.
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
# `null` is how any layer takes a value back.
letters = string.ascii_letters + string.digits + "/._-"
words = st.text(letters, min_size=1, max_size=8).filter(lambda word: word != "null")
VALUES = {
    "mixed_precision": st.sampled_from(["no", "bf16", "fp16"]),
    "gradient_accumulation_steps": st.integers(1, 64),
    "num_processes": st.integers(1, 64),
    "main_process_port": st.integers(0, 65535),
    "max_restarts": st.integers(0, 3),
    "monitor_interval": st.floats(1e-6, 1e3),
    "use_cpu": st.booleans(),
    "project_dir": words,
    "log_with": st.lists(words, max_size=3),
    "output_dtype": st.sampled_from(["float32", "compute"]),
    "mesh.tp": st.integers(1, 8),
    "mesh.dp_shard": st.integers(1, 8),
    "process_group.timeout_seconds": st.floats(0.1, 1e4),
    "dataloader.data_seed": st.integers(0, 2**31),
    "dataloader.even_batches": st.booleans(),
    "alpha.stage": st.sampled_from([1, 2, 3]),
    "alpha.bucket_mb": st.floats(0.5, 100),
    "alpha.label": words,
    "alpha.wrapping.min_params": st.integers(0, 10**9),
}
layers = st.fixed_dictionaries({}, optional=VALUES)


def nested(flat):
    tree = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        here = tree
        for part in path:
            here = here.setdefault(part, {})
        here[last] = value
    return tree


def value_of(resolved, key):
    first, *rest = key.split(".")
    here = resolved.section_for(first) if first not in Config.model_fields else getattr(resolved.config, first)
    for part in rest:
        here = here[part] if isinstance(here, dict) else getattr(here, part)
    return here


def load(file_layer, registry, **louder):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "c.yaml"
        file.write_text(write(nested(file_layer)), encoding="utf-8")
        return load_config(file, registry=registry, **{"environ": {}, **louder})


@settings(max_examples=60, deadline=None)
@given(file_layer=layers, environment=layers, flags=layers)
def test_the_loudest_layer_wins_and_is_named(registry, file_layer, environment, flags):
    # A word in the environment is text; quotes that YAML would put around it are not part of it.
    environ = {
        "DRIVETRAIN_" + key.upper().replace(".", "__"): value if isinstance(value, str) else write(value)
        for key, value in environment.items()
    }
    resolved = load(file_layer, registry, environ=environ, overrides=flags)
    for key in VALUES:
        kinds = {"flag": flags, "environment": environment, "file": file_layer}
        said = next(((kind, layer[key]) for kind, layer in kinds.items() if key in layer), None)
        if said is not None:
            assert (resolved.origin(key).kind, value_of(resolved, key)) == said, key
        elif not key.startswith("alpha."):
            assert resolved.origin(key).kind == "default"


@settings(max_examples=60, deadline=None)
@given(file_layer=layers, flags=layers)
def test_json_gives_back_values_and_origins(registry, file_layer, flags):
    resolved = load(file_layer, registry, overrides=flags)
    again = ResolvedConfig.from_json(resolved.to_json())
    assert again == resolved
    assert again.to_json() == resolved.to_json()


@settings(max_examples=60, deadline=None)
@given(file_layer=layers)
def test_a_configuration_written_out_reads_the_same(registry, file_layer):
    resolved = load(file_layer, registry)
    values = {**resolved.config.model_dump(mode="json"), **resolved.sections}
    again = load(values, registry)
    assert (again.config, again.sections) == (resolved.config, resolved.sections)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
        max_leaves=6,
    )
)
def test_what_is_written_is_read_back(value):
    document = locate(f"key: {write(value)}\n", "c.yaml")
    assert document.problems == []
    assert document.values == {"key": value}


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=string.printable, max_size=60))
def test_any_text_is_read_or_refused_with_a_place(registry, text):
    document = locate(text, "c.yaml")
    for problem in document.problems:
        assert problem.origin.line >= 1
        assert problem.origin.line <= text.count("\n") + text.count("\r") + 2
        assert problem.origin.column >= 1
