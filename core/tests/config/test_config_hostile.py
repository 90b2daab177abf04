"""Files that nobody meant to write: each is read, or refused in sentences with a place; none costs time or memory."""

from __future__ import annotations

import random
import re
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from drivetrain.cli.config import as_file, report
from drivetrain.config import ResolvedConfig, Section, default_file, load_config, rows, worker_config
from drivetrain.config.accelerate_file import judge_file
from drivetrain.config.accelerate_rules import RULES, SECTIONS, number, whole
from drivetrain.config.keys import CORE_KEYS
from drivetrain.config.locate import MAX_BYTES, locate
from drivetrain.config.schema import Config
from drivetrain.errors import BackendError, ConfigError
from drivetrain.registry import get_registry

EXAMPLES = Path(__file__).parents[3] / "examples"
CHOICES = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}

VALUES = (
    "[2]", "{a: 1}", "{}", "[]", "''", "null", "~", "true", "no", "-1", "0", "1.5", "1e999", ".nan", "-.inf", "1e308",
    "9" * 40, "9" * 5000, "0x" + "f" * 6000, "'9999999999999999999999'", "'99999999999999999999:3'", "'0:3,1:2'",
    "!!bool foo", "!!int ''", "!!int 0x", "!!float x", "!!null x", "!!str 5", "!!timestamp abc",
    "!!timestamp 2020-01-01", "!!binary aGk=", "!!binary é", "!!set {a, b}", "!!omap [a: 1]", "!!map x", "!!seq x",
    "!ruby 1", "!!python/name:os.sep", "&a [*a]", "&a {b: *a}", "&a {<<: *a}", "*a", "{<<: 3}", "{<<: [1]}",
    "{<<: {a: 1}}", "{<<: [{a: 1}, {a: 2}]}",
    '"\\ud800"', '"\\0"', '"\\e[31m"', '["\\ud800"]', "'٣'", "2020-01-01", "1:30", "1:30.5", "auto", "all", "${HOME}",
    "[true, {a: [1]}]", "[null]", "[[[[1]]]]", "{1: 2}", "{[a]: 2}", "? x", ": y", "-", "|\n  x", "'\\'", "%", "@", "`",
    "'" + "x" * 3000 + "'", "[" * 2000, "{a: " * 2000,
)  # fmt: skip
MARKS = "{}[]:,&*!|>'\"%@`#-? \t\x00\x07\ud800é\u2028~<."
KEYS = ("", "x_", "<<", "1", "null", "[a]", "zz_config", '"\\ud800"', '"\\e[31m"', "mesh", "k" * 3000)


@pytest.fixture(scope="module")
def texts():
    """The examples, a file of ours with every key, and files of Accelerate's with every key that anybody knows."""
    found = [path.read_text(encoding="utf-8") for path in sorted(EXAMPLES.glob("*.yaml"))]
    assert len(found) >= 7
    everything = default_file()
    found += [everything, "".join(line.removeprefix("# ") for line in everything.splitlines(keepends=True))]
    found.append("".join(f"{key}: 1\n" for key in RULES))
    for name, rules in {**SECTIONS, **get_registry().import_rules()}.items():
        chosen = f"distributed_type: {CHOICES[name]}\n" if name in CHOICES else ""
        found.append(chosen + f"{name}:\n" + "".join(f"  {key}: 1\n" for key in rules))
    return found


def mutated(rng, text):
    """The text after one to three changes of lines."""
    lines = text.splitlines()
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = rng.randrange(len(lines))
        line, kind = lines[at], rng.randrange(10)
        key, colon, value = line.partition(":")
        if kind <= 4 and colon:
            lines[at] = f"{key}: {rng.choice(VALUES)}"
        elif kind == 5:
            lines.insert(at, rng.choice(lines))
        elif kind == 6 and len(lines) > 1:
            del lines[at]
        elif kind == 7:
            cut = rng.randrange(len(line) + 1)
            lines[at] = line[:cut] + rng.choice(MARKS) + line[cut:]
        elif kind == 8:
            lines[at] = " " * rng.randrange(5) + line.strip()
        else:
            lines[at] = f"{rng.choice(KEYS)}{rng.choice([key.strip(), ''])}:{value}"
    return "\n".join(lines) + "\n"


def loaded(text, tmp_path):
    """Load a text as a launch does; returns the sentences about it, none when it was read."""
    file = tmp_path / "c.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        found = load_config(file, environ={})
        assert rows(found)
        handed = found.to_json()
        assert ResolvedConfig.from_json(handed).to_json() == handed
        assert worker_config({"DRIVETRAIN_CONFIG": handed}).to_json() == handed
    except ConfigError as error:
        told = error
    except BackendError as error:
        return [note for note in error.__notes__ if f"{file}:" in note]
    else:
        return []
    *places, count = told.what.splitlines() if "\n" in told.what else [told.what, ""]
    for line in places:
        assert re.match(rf"{re.escape(str(file))}:\d+:\d+: |the configuration file .* cannot be read", line), line
    assert len(str(told)) < 20_000
    assert not count or re.fullmatch(r"\d+ mistakes? in the configuration", count)
    return places


def imported(text, tmp_path):
    """Show a text as ``drivetrain config import`` does."""
    document = locate(text, "c.yaml")
    if not document.problems:
        verdicts = judge_file(document.values, get_registry())
        assert "\n".join(report(verdicts)).encode()
        assert as_file(verdicts, "c.yaml").encode()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.filterwarnings("ignore::UserWarning")  # keys without which the run goes on
def test_no_change_of_a_file_ends_in_a_traceback(tmp_path, texts, seed):
    rng = random.Random(seed)
    refused = 0
    for _ in range(150):
        text = mutated(rng, rng.choice(texts))
        try:
            sentences = loaded(text, tmp_path)
            imported(text, tmp_path)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} for {text!r}") from error
        refused += bool(sentences)
        for sentence in sentences:
            assert sentence.replace("\n", "").isprintable(), ascii(sentence)
    assert 30 < refused < 150  # changes that nobody can notice would prove nothing


def bomb(line, levels=12):
    return f"a0: &a0 {line}\n" + "".join(f"a{n}: &a{n} {line.replace('1', f'*a{n - 1}')}\n" for n in range(1, levels))


BOMBS = {
    "aliases in lists": (bomb("[1, 1, 1, 1, 1, 1, 1, 1, 1]"), "more than 10,000 keys and values"),
    "aliases in mappings": (bomb("{a: 1, b: 1, c: 1, d: 1, e: 1, f: 1, g: 1}"), "more than 10,000 keys and values"),
    "merges of merges": (
        "a0: &a0 {a: 1, b: 2}\n"
        + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}], k{n}: 1}}\n" for n in range(1, 12)),
        "more than 10,000 keys and values",
    ),
    "one wide mapping merged often": (
        f"a: &a {{{', '.join(f'k{n}: 1' for n in range(3000))}}}\n"
        + "".join(f"b{n}: {{<<: *a}}\n" for n in range(2000)),
        "more than 10,000 keys and values",
    ),
    "a chain of aliases": (bomb("[1]", 2000), "nested more than 50 levels deep"),
    "brackets": ("a: " + "[" * 100_000, "nested more than 50 levels deep"),
    "braces": ("{a: " * 100_000, "nested more than 50 levels deep"),
    "question marks": ("? " * 100_000, "nested more than 50 levels deep"),
    "dashes": ("a:\n" + "- " * 100_000, "nested more than 50 levels deep"),
    "indented keys": ("\n".join(" " * n + "a:" for n in range(700)), "nested more than 50 levels deep"),
    "many keys": ("".join(f"k{n}: 1\n" for n in range(20_000)), "more than 10,000 keys and values"),
    "a long number": ("num_processes: " + "9" * 400_000, "cannot be read as 'int'"),
    "a long hexadecimal number": ("num_processes: 0x" + "f" * 400_000, "is too large"),
    "a long text": ("num_processes: " + "x" * 400_000, "expected a whole number"),
    "a long key": (f'? "{"k" * 400_000}"\n: 1\n', r"unknown key 'k+\.\.\. \(400,000 characters\)'"),
    "unknown keys": ("".join(f"k{n}: 1\n" for n in range(4_900)), "more than 100 mistakes"),
    "unknown keys of a section": ("ddp:\n" + "".join(f"  k{n}: 1\n" for n in range(4_900)), "more than 100 mistakes"),
    "a large file": ("# much\n" * (MAX_BYTES // 7 + 1), "is larger than 500,000 bytes"),
}

READING = """
import resource, sys
from drivetrain.config import load_config
from drivetrain.errors import ConfigError
load_config(environ={}, overrides={"distributed_type": "ddp", "ddp.bucket_cap_mb": 25})
before = resource.getrusage(resource.RUSAGE_SELF)
for file in sys.argv[1:]:
    try:
        load_config(file, environ={})
    except ConfigError as error:
        print(str(error).replace("\\n", " "))
    after = resource.getrusage(resource.RUSAGE_SELF)
print(after.ru_maxrss - before.ru_maxrss)
"""


def test_what_stands_for_billions_of_values_is_refused_before_it_is_made(tmp_path):
    files = []
    for number_, (text, _) in enumerate(BOMBS.values()):
        files.append(tmp_path / f"{number_}.yaml")
        files[-1].write_text(text, encoding="utf-8")

    def no_more_time():  # of the processor: all of them together, each of which is refused in less than one second
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))

    done = subprocess.run(
        [sys.executable, "-c", READING, *map(str, files)],
        capture_output=True, text=True, timeout=180, check=True, preexec_fn=no_more_time,
    )  # fmt: skip
    *said, kilobytes = done.stdout.splitlines()
    assert len(said) == len(BOMBS)
    for name, sentence in zip(BOMBS, said, strict=True):
        assert re.search(BOMBS[name][1], sentence), (name, sentence[:300])
    assert int(kilobytes) < 100_000


def test_a_value_in_the_environment_is_bounded_too(load):
    for value in ("{a: &a [1, *a]}", "[" * 1000, "!!set {a}", "{[a]: 1}"):
        with pytest.raises(ConfigError, match=r"DRIVETRAIN_ALPHA__OPTIONS: .* is not a valid value"):
            load("", environ={"DRIVETRAIN_ALPHA__OPTIONS": value})


def test_merged_keys_give_way_to_those_written_out_and_the_first_of_a_list_decides():
    text = (
        "one: &one {a: 1, b: 1}\ntwo: &two {b: 2, c: 2}\nall: {<<: [*one, *two], c: 3}\n"
        "again: {<<: *one, a: {x: 5}}\n"
    )
    document = locate(text, "c.yaml")
    assert document.problems == []
    assert document.values["all"] == {"a": 1, "b": 1, "c": 3}
    assert document.values["again"] == {"b": 1, "a": {"x": 5}}
    assert str(document.origins["all", "c"]) == "c.yaml:3:28"
    assert ("again", "a") in document.origins


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: !!bool foo", "c.yaml:1:4: this is not valid YAML: 'foo' cannot be read as 'bool'"),
        ("a: !!int ''", "c.yaml:1:4: this is not valid YAML: '' cannot be read as 'int'"),
        ("a: !!timestamp 2020-01-01", "c.yaml:1:4: this is not valid YAML: the tag 'timestamp' has no meaning here"),
        ("a: !!binary aGk=", "c.yaml:1:4: this is not valid YAML: the tag 'binary' has no meaning here"),
        ("a: 0x" + "f" * 400, "c.yaml:1:4: this is not valid YAML: this number of 402 digits is too large"),
        ('a: "x\\0"', "it holds the character U+0000, which neither a path nor a name can hold"),
        ('a: "\\ud800"', "it holds the character U+D800, which neither a path nor a name can hold"),
        ('"\\e[31mred": 1', "c.yaml:1:1: a key must be a word, without characters that cannot be shown"),
        ("a: {<<: 3}", "c.yaml:1:9: this is not valid YAML: << merges keys and values, or a list of such; this is"),
        ("a: &a {b: {<<: *a}}", "an anchor contains itself"),
    ],
)  # fmt: skip
def test_what_yaml_lets_through_and_nobody_can_use(text, words):
    (problem,) = locate(text, "c.yaml").problems
    assert words in str(problem)


def test_a_value_that_a_rule_does_not_expect_is_a_sentence_at_its_key(tmp_path):
    def words(section, line, **more):
        head = "".join(f"{key}: {value}\n" for key, value in more.items())
        return loaded(f"{head}{section}:\n  {line}\n", tmp_path)

    megatron = {"distributed_type": "MEGATRON_LM"}
    assert words("megatron_lm_config", "megatron_lm_pp_degree: [2]", **megatron) == [
        f"{tmp_path}/c.yaml:3:26: megatron_lm_config.megatron_lm_pp_degree is not supported; write a number"
    ]
    # int() would have made 2 of it.
    assert "write a whole number" in words("megatron_lm_config", "megatron_lm_tp_degree: 2.7", **megatron)[0]
    assert "write a number" in words("deepspeed_config", "zero_stage: true", distributed_type="DEEPSPEED")[0]
    assert "write a number" in words("deepspeed_config", "gradient_clipping: .inf", distributed_type="DEEPSPEED")[0]
    assert words("megatron_lm_config", "megatron_lm_tp_degree: '2'", **megatron) == []


def test_numbers_as_files_hold_them():
    assert [whole(value) for value in (3, "3", 3.0, "1e5", 2**60 + 1)] == [3, 3, 3, 100_000, 2**60 + 1]
    assert [number(value) for value in (1, "0.5", 2.5)] == [1.0, 0.5, 2.5]
    for value in (True, "two", None, [1], {}, float("inf"), "1e400", "nan"):
        with pytest.raises(ValueError, match="write a number"):
            whole(value)


def test_a_check_of_a_section_that_fails_is_said_at_the_section(load, registry, monkeypatch):
    for error in (TypeError("unhashable"), RecursionError("too deep"), OverflowError("too large")):

        class Broken(Section):
            depth: int = 1

            def __init__(self, error=error, **values):
                raise error

        class Failing(Section):
            inner: Broken | None = None

            @classmethod
            def model_validate(cls, *values, error=error, **settings):
                raise error

        monkeypatch.setitem(registry.sections, "gamma", Failing)
        with pytest.raises(ConfigError, match=rf"^c\.yaml:1:1: gamma: a check .* failed \({type(error).__name__}: "):
            load("gamma: {inner: {depth: 1}}\n")


@pytest.mark.parametrize("value", ["false", "0", "3", "word", "[1]", "{a: 1}"])
def test_a_section_of_nobody_is_named_whatever_it_holds(tmp_path, value):
    assert re.search("unknown key 'x_config'", loaded(f"x_config: {value}\n", tmp_path)[0])


def test_an_empty_section_of_nobody_is_mentioned_and_one_of_accelerates_is_not(tmp_path):
    with pytest.warns(UserWarning, match=r"c\.yaml:1:11: .*unknown key 'x_config'.*; the run goes on without it"):
        assert loaded("x_config: {}\n", tmp_path) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loaded("fsdp_config: {}\nipex_config:\n", tmp_path) == []
    assert "expected keys and values" in loaded("fsdp_config: false\n", tmp_path)[0]


def test_a_variable_in_a_value_is_said_to_be_literal(tmp_path):
    with pytest.warns(UserWarning, match="not filled in") as told:
        assert loaded("project_dir: ${HOME}/runs\nlog_with: [jsonl, $HOME]\nddp: {comm_hook: no}\n", tmp_path) == []
    first, second = (str(each.message) for each in told)
    assert first == (
        f"{tmp_path}/c.yaml:1:14: project_dir: "
        "variables in '${HOME}/runs' are not filled in; write the value itself, "
        "or set DRIVETRAIN_PROJECT_DIR in a shell, which fills them in."
    )
    assert "log_with" in second
    assert len(told) == 2  # the workers, which read what was handed over, do not say it again
    with pytest.warns(UserWarning, match="DRIVETRAIN_MESH__TP in a shell"):
        assert "mesh.tp: expected a whole number, not '${TP}'" in loaded("mesh: {tp: '${TP}'}\n", tmp_path)[0]


def test_the_keys_that_need_no_pydantic_are_those_of_the_schema():
    assert frozenset(Config.model_fields) == CORE_KEYS
