"""Write what the documents say about the code: the table of backends, the tree of files, line counts, measured numbers.

    make docs

All but the counts stand between marks; tests/readme fails when something is out of date.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from scipy.stats import kendalltau

from drivetrain.launch.environment import OTHERS, TORCHRUN
from drivetrain.launch.machines import PLATFORMS, Reading
from drivetrain.registry import get_registry
from drivetrain_testing import report
from drivetrain_testing.cases.honesty import PROOFS
from drivetrain_testing.kit import all_cases, user_model_cases

ROOT = Path(__file__).resolve().parents[1]

TWO_SCREENS = 120
"""Lines of a how-to from which on it is named: about 2,600 pixels of the site in a window of 1,280."""


def backends() -> str:
    """One row for each backend of this repository: what its plugin says about itself, and what the kit found."""
    rows = ["| `distributed_type` | also written | distribution | what it is | conformance |", "|---|---|---|---|---|"]
    for each in get_registry().reports():
        ours = each.distribution == "drivetrain" or (ROOT / "plugins" / each.name).is_dir()
        if ours:
            aliases = ", ".join(f"`{alias.upper()}`" for alias in each.aliases)
            runs = conformance_runs().get(each.name)
            found = report.summary(runs) if runs else "no report"
            rows.append(f"| `{each.name}` | {aliases} | `{each.distribution}` | {each.summary} | {found} |")
    return "\n".join(rows)


@cache
def conformance_runs() -> dict[str, list[report.Run]]:
    """What the kit found, by backend, from the files that `make reports` writes."""
    return {path.stem: report.read(path)[1] for path in sorted((ROOT / "docs/reports").glob("*.json"))}


def conformance() -> str:
    """One row for each conformance run of this repository, then the declared gaps with their reasons."""
    rows = ["| backend | section | processes | engines | passed | gaps |", "|---|---|---|---|---|---|"]
    gaps: dict[str, None] = {}
    for run in (run for runs in conformance_runs().values() for run in runs):
        section = ", ".join(f"`{key}: {value}`" for key, value in run.section.items())
        engines = ", ".join(f"{name} {version}" for name, version in run.engines.items())
        worlds = ", ".join(map(str, run.world_sizes))
        counts = f"{run.count(report.PASSED)} | {run.count(report.GAP)}"
        rows.append(f"| `{run.backend}` | {section} | {worlds} | {engines} | {counts} |")
        gaps |= {f"- `{run.backend}`, `{case}`: {reason}.": None for case, reason in run.gaps.items()}
    return "\n".join([*rows, "", *gaps])


def cases() -> str:
    """Every case with the sentence that it proves and the reports that it guards against."""
    rows = ["| case | what holds | guards against |", "|---|---|---|"]
    for case in [*all_cases().values(), *user_model_cases().values()]:
        holds = (inspect.getdoc(case.function) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "`")
        rows.append(f"| `{case.name}` | {holds} | {case.guards} |")
    return "\n".join(rows)


def proofs() -> str:
    """Which case proves which capability."""
    rows = ["| capability | proved where it is declared by | and where it is not by |", "|---|---|---|"]
    for name, pair in PROOFS.items():
        where, where_not = (f"`{case.rstrip('.')}`" if case else "" for case in pair)
        rows.append(f"| `{name}` | {where} | {where_not} |")
    return "\n".join(rows)


COLUMNS = {
    "single": ("single",),
    "ddp": ("ddp-2", "ddp-3", "ddp-4"),
    "fsdp": ("fsdp-2",),
    "deepspeed 1": ("deepspeed-1",),
    "deepspeed 2": ("deepspeed-2",),
    "deepspeed 3": ("deepspeed-3",),
    "tp": ("tp-2",),
    "pp": ("pp-2",),
}
"""Columns of the table of scripts, and the places of ``outcomes.json`` that each stands for."""


def parity() -> str:
    """How each script of tests/parity ends under each backend: a table, then the words of the refusals and defects."""
    folder = ROOT / "tests/parity/scripts"
    outcomes = json.loads((folder / "outcomes.json").read_text(encoding="utf-8"))
    words: dict[str, list[str]] = {}
    shown, partial, every = [], [], Counter[str]()
    for path in sorted(folder.glob("*.py")):
        rows, alike = [], []
        for name, says, whole in scripts_of(path):
            cells = [parity_cell(outcomes.get(name, {}), places, f"`{name}`", words) for places in COLUMNS.values()]
            every.update("defects" if "**" in cell else cell.partition(" ")[0] for cell in cells)
            if set(cells) == {"same"}:
                alike.append(f"`{name}` ({says})")
            else:
                rows.append(f"| `{name}`: {says} | " + " | ".join(cells) + " |")
            if whole:
                partial.append(f"- `{name}` is empty where data are shared out: {whole}.")
        shown += ["", f"## {purpose(path).rstrip('.')}"]
        if rows:
            shown += ["", "| script | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|", *rows]
        if alike:
            shown += ["", f"The same everywhere: {'; '.join(alike)}."]
    total = f"{every['same']} cells are the same, {every['refused']} refused, {every['defects']} defects."
    told = [f"{number}. {text} ({', '.join(names)})" for number, (text, names) in enumerate(words.items(), 1)]
    return "\n".join([total, *shown, "", *partial, "", "## The words", "", *told])


def parity_cell(row: dict[str, Any], places: tuple[str, ...], name: str, words: dict[str, list[str]]) -> str:
    """What a column says; where its places differ, each outcome with its places. Words are collected on the way."""
    found: dict[str, list[str]] = {}
    for place in places:
        if place not in row:
            continue
        kind, text = (row[place], "") if isinstance(row[place], str) else next(iter(row[place].items()))
        said = "same" if kind == "same" else f"**{kind}**"
        if kind == "refused":
            text = plain(text)
            users = words.setdefault(text, [])
            users += [name] if name not in users else []
            said = f"refused ({list(words).index(text) + 1})"
        found.setdefault(said, []).append(place.rpartition("-")[2])
    if len(found) <= 1:
        return next(iter(found), "")
    return ", ".join(f"{said} on {' and '.join(worlds)}" for said, worlds in found.items())


def plain(text: str) -> str:
    """Text as it stands, between its own code marks, whatever signs of Markdown it holds."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_\[\]<>{}$|])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def scripts_of(path: Path) -> list[tuple[str, str, str]]:
    """Name, first line of the docstring and ``whole_batch`` of each function with the decorator ``script``."""
    found = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            for each in node.decorator_list:
                if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "script":
                    says = (ast.get_docstring(node) or "").partition("\n")[0].rstrip(".").replace("``", "`")
                    given = {keyword.arg: keyword.value for keyword in each.keywords}
                    whole = given.get("whole_batch")
                    reason = str(whole.value) if isinstance(whole, ast.Constant) else ""
                    found.append((node.name, says.replace("|", "\\|"), reason))
    return found


def purpose(path: Path) -> str:
    """The first line of a file's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def launchers() -> str:
    """One row for each launcher that numbers processes, with the variables and where they are from."""
    rows = ["| launcher | rank, world | on this machine | machine | rank 0 is on | contract |", "|---" * 6 + "|"]
    for names in (TORCHRUN, *OTHERS):
        cells = [", ".join((spelt(names.rank), spelt(names.world)))]
        cells += [
            ", ".join(filter(None, map(spelt, pair))) for pair in ((names.local, names.here), (names.node, names.nodes))
        ]
        address = ways(names.address) or "`MASTER_ADDR`"
        rows.append(f"| {names.launcher} | {' | '.join(cells)} | {address} | {names.source} |")
    return "\n".join(rows)


def platforms() -> str:
    """One row for each cluster that numbers machines, with the variables and where they are from."""
    rows = ["| cluster | this machine | machines | machine 0 | port | contract |", "|---" * 6 + "|"]
    for each in PLATFORMS:
        cells = [ways(getattr(each, name)) for name in ("rank", "count", "address", "port")]
        within = f", where `{each.within}` is set" if each.within else ""
        rows.append(f"| {each.name}{within} | {' | '.join(cells)} | {each.source} |")
    return "\n".join(rows)


def spelt(names: tuple[str, ...]) -> str:
    """Alternatives, the first of which counts."""
    return " or ".join(f"`{name}`" for name in names)


def ways(readings: tuple[Reading, ...]) -> str:
    """The variables of alternatives, the first of which counts."""
    return " or ".join(dict.fromkeys(" with ".join(f"`{name}`" for name in way.variables) for way in readings))


def tree() -> str:
    """Every source file of every distribution, with the first line of its docstring."""
    lines = []
    for source in (ROOT / "core/src", ROOT / "kit/src", *sorted(ROOT.glob("plugins/*/src"))):
        files = sorted(source.rglob("*.py"), key=lambda path: (path.parent.as_posix(), path.name))
        width = max(len(path.name) for path in files) + 2
        folder = None
        for path in files:
            if path.parent != folder:
                folder = path.parent
                lines.append(f"{folder.relative_to(ROOT).as_posix()}/")
            lines.append(f"  {path.name:<{width}}{purpose(path)}".rstrip())
    return "```text\n" + "\n".join(lines) + "\n```"


def counted(text: str) -> str:
    """The reading order with the size of each file or folder behind its name, to two digits."""
    head, heading, tail = text.partition("## The tree")

    def with_count(match: re.Match[str]) -> str:
        path = ROOT / match.group(1)
        files = path.rglob("*.py") if path.is_dir() else [path]
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        return f"`{match.group(1)}` ({float(f'{lines:.1e}'):.0f} lines)"

    return re.sub(r"`((?:core|kit|plugins)/[\w/.]+)`(?: \(\d+ lines\))?", with_count, head) + heading + tail


def measured() -> str:
    """What the runs of the tutorial came to, from the file that `make pictures` writes."""
    runs = json.loads((ROOT / "docs/tutorial/pictures/runs.json").read_text(encoding="utf-8"))
    rows = [
        "| `distributed_type` | last loss | farthest from one process | test accuracy | MiB on each rank |",
        "|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        apart = max(abs(mine - other) for mine, other in zip(run["losses"], runs["single"]["losses"], strict=True))
        held = ", ".join(f"{count / 2**20:.0f}" for count in run["memory"])
        distance = f"{apart:.0e}" if name != "single" else ""
        rows.append(f"| `{name}` | {run['losses'][-1]:.4f} | {distance} | {run['accuracy']:.2%} | {held} |")
    return "\n".join(rows)


def trainer() -> str:
    """How far Transformers' Trainer is from itself on one process, from the file that `make trainer-table` writes."""
    record = json.loads((ROOT / "plugins/transformers/tests/trainer_table.json").read_text(encoding="utf-8"))
    features = list(next(iter(record.values())))
    words: list[str] = []
    rows = ["| | " + " | ".join(features) + " |", "|---" * (len(features) + 1) + "|"]
    for name, cells in record.items():
        told = []
        for found in cells.values():
            if isinstance(found, str):
                text = plain(found.replace("\n", " "))
                words += [text] if text not in words else []
                told.append(f"refused ({words.index(text) + 1})")
            else:
                told.append(f"{found:.0e}" if found else "0")
        rows.append(f"| {name} | " + " | ".join(told) + " |")
    return "\n".join([*rows, "", *(f"{number}. {text}" for number, text in enumerate(words, 1))]).rstrip()


def optimizers() -> str:
    """How each optimizer ends in each place, from the file that `make optimizers` writes."""
    record = json.loads((ROOT / "tests/parity/optimizers.json").read_text(encoding="utf-8"))
    places = list(next(iter(record.values())))
    words: list[str] = []
    rows = ["| | " + " | ".join(places) + " |", "|---" * (len(places) + 1) + "|"]
    for name, cells in record.items():
        told = []
        for cell in cells.values():
            (kind, text), *_ = cell.items()
            if kind == "refused":
                words += [plain(text)] if plain(text) not in words else []
                told.append(f"refused ({words.index(plain(text)) + 1})")
            else:
                told.append("0" if float(text) == 0 else text)
        rows.append(f"| {name} | " + " | ".join(told) + " |")
    return "\n".join([*rows, "", *(f"{number}. {text}" for number, text in enumerate(words, 1))]).rstrip()


def planned() -> str:
    """Predicted against counted bytes of ranks, from the file that the planner's tests write."""
    record = json.loads((ROOT / "plugins/planner/tests/planner_memory.json").read_text(encoding="utf-8"))
    errors = {name: found["predicted"] / found["counted"] - 1 for name, found in record.items()}
    models = list(dict.fromkeys(name.split("; ")[0] for name in errors))
    layouts = list(dict.fromkeys(name.partition("; ")[2] for name in errors))
    rows = ["| layout | " + " | ".join(models) + " |", "|---" + "|--:" * len(models) + "|"]
    for layout in sorted(layouts, key=lambda each: each.split("; ")[0]):
        found = [errors.get(f"{model}; {layout}") for model in models]
        rows.append(f"| {layout} | " + " | ".join("" if one is None else f"{one:+.3%}" for one in found) + " |")
    return "\n".join([*rows, "", f"{spread(list(errors.values()))}, over {len(errors)} combinations."])


def spread(errors: list[float]) -> str:
    """Mean and worst of errors."""
    sizes = [abs(each) for each in errors]
    return f"Mean error {sum(sizes) / len(sizes):.2%}, worst {max(sizes):.2%}"


def published() -> str:
    """Predicted against published memory of others' runs on accelerators."""
    folder = ROOT / "plugins/planner/tests"
    file = json.loads((folder / "public_runs.json").read_text(encoding="utf-8"))
    record = json.loads((folder / "public_memory.json").read_text(encoding="utf-8"))
    rows = ["| run | tensors | with the allocator's | published | error |", "|---|--:|--:|--:|--:|"]
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in file["rows"]:
        if row["name"] not in record:
            continue
        tensors, reserved = (record[row["name"]][key] / 2**30 for key in ("peak", "reserved"))
        if row["gib"] is not None:
            # Of a run that ended: a full allocator gives back what it keeps beside tensors.
            reserved = min(reserved, row["device"])
        cells = [f"{tensors:.1f} GiB", f"{reserved:.1f} GiB", "out of memory", ""]
        if row["gib"] is not None:
            error = reserved / row["gib"] - 1
            errors[row["seen"]].append(error)
            cells[2:] = [f"{row['gib']:.1f} GiB", f"{error:+.1%}"]
        rows.append(f"| {row['name']}{' (seen)' if row['seen'] else ''} | {' | '.join(cells)} |")
    told = [
        f"{spread(errors[False])}, over the {len(errors[False])} rows that played no part while this was made."
    ]
    if errors[True]:
        told.append(f"{spread(errors[True])}, over the {len(errors[True])} that did (seen).")
    sources = [f"- {text}." for text in file["sources"].values()]
    return "\n".join([*rows, "", *told, "", *sources])


def published_seconds() -> str:
    """Predicted against published seconds of a step of the same runs, and how far their orders agree."""
    folder = ROOT / "plugins/planner/tests"
    file = json.loads((folder / "public_runs.json").read_text(encoding="utf-8"))
    record = json.loads((folder / "public_memory.json").read_text(encoding="utf-8"))
    rows = ["| run | predicted | published | published / predicted |", "|---|--:|--:|--:|"]
    within, over = [], []
    for row in file["rows"]:
        if row["seconds"] is not None:
            predicted, seconds = record[row["name"]]["seconds"], row["seconds"]
            (within if row["ranks"] <= 8 else over).append((predicted, seconds))
            rows.append(f"| {row['name']} | {predicted:.2f} s | {seconds:.2f} s | {seconds / predicted:.1f} |")
    tau, most = (kendalltau(*zip(*pairs, strict=True)).statistic for pairs in (within, within + over))
    told = f"Kendall's tau of the two orders is {tau:.2f} over the {len(within)} runs within a machine"
    return "\n".join([*rows, "", f"{told}, and {most:.2f} over all {len(within + over)}."])


def on_device() -> str:
    """Predicted against measured memory of our own runs on an accelerator."""
    folder = ROOT / "plugins/planner/tests"
    file = json.loads((folder / "device_runs.json").read_text(encoding="utf-8"))
    record = json.loads((folder / "device_memory.json").read_text(encoding="utf-8"))
    rows = ["| model | layout | precision | predicted | measured | error |", "|---|---|---|--:|--:|--:|"]
    errors = []
    for row in file["rows"]:
        predicted = record[f"{row['model']}; {row['layout']}; {row['precision']}"] / 2**30
        errors.append(predicted / row["allocated"] - 1)
        sizes = f"{predicted:.1f} GiB | {row['allocated']:.1f} GiB | {errors[-1]:+.1%}"
        rows.append(f"| {row['model']} | {row['layout']} | {row['precision']} | {sizes} |")
    return "\n".join([*rows, "", f"{file['source']}. {spread(errors)}."])


def surface() -> str:
    """Return how each method of what is prepared ends, from what `run_scripts.py --surface --record` writes."""
    record = json.loads((ROOT / "tests/parity/surface.json").read_text(encoding="utf-8"))
    places = list(next(iter(record.values())))
    shown = {"same": "=", "refused": "refused", "raw error": "torch's error", "different": "differs"}
    rows: list[str] = []
    counts = {place: Counter() for place in places}
    words: dict[str, list[str]] = {}
    of = ""
    for name, cells in record.items():
        kind, _, method = name.partition(".")
        if kind != of:
            rows += ["", f"| {kind} | " + " | ".join(places) + " |", "|---" * (len(places) + 1) + "|"]
            of = kind
        told = []
        for place, cell in cells.items():
            ending, text = (cell, "") if isinstance(cell, str) else next(iter(cell.items()))
            counts[place][shown[ending]] += 1
            told.append(shown[ending])
            if text:
                # Where it is an operation's name: a method's name may be an English word, or a letter of one.
                text = re.sub(rf"(aten\.|`|, and ){re.escape(method)}(?=[.`]| (?:reads|joins) )", r"\1(it)", text)
                words.setdefault(plain(text), []).append(f"`{method}` ({place})")
        rows.append("| `" + method.replace("|", "\\|") + "` | " + " | ".join(told) + " |")
    total = ["| | " + " | ".join(places) + " |", "|---" * (len(places) + 1) + "|"]
    total += [
        f"| {ending} | " + " | ".join(str(counts[place][ending]) for place in places) + " |"
        for ending in shown.values()
        if any(counts[place][ending] for place in places)
    ]
    told = [
        f"- {text} ({', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''})"
        for text, names in words.items()
    ]
    return "\n".join([*total, *rows, "", "The words, with (it) for the name of the method:", "", *told])


STEPS = {
    "`single`": "Training step: 1 process, width 64",
    "`ddp`": "Training step: 2 processes DDP, width 512",
    "`fsdp`": "fsdp, training step: 2 processes, 3 blocks of width 768",
    "`deepspeed`, ZeRO 2": "deepspeed, training step: ZeRO-2, 1 process, 6 blocks of width 768",
    "`deepspeed`, ZeRO 3": "deepspeed, training step: ZeRO-3, 1 process, 6 blocks of width 768",
    "`megatron`, tensor parallel": "megatron, training step: tp over 2 processes, 6 blocks of width 512",
    "`megatron`, pipeline": "megatron, training step: pp over 2 processes, 6 blocks of width 512, 4 micro-batches, "
    "1f1b",
}
"""Sections of benchmarks/RESULTS.md that say what a step costs under each backend."""


def speed() -> str:
    """The step of each backend against the engine driven by hand, from the file that `make bench` writes."""
    results = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
    rows = ["| | the engine by hand, CPU ms a step | drivetrain |", "|---|--:|--:|"]
    for name, heading in STEPS.items():
        title = re.search(rf"^### {re.escape(heading)}(; bare is .*)?$", results, re.MULTILINE)
        if title is None:
            raise ValueError(f"benchmarks/RESULTS.md has no section {heading!r}")
        table = [
            [cell.strip() for cell in line.split("|")[1:-1]]
            for line in results[title.end() :].partition("\n### ")[0].splitlines()
            if line.startswith("|")
        ]
        unit = 1e-3 if "us" in table[0][1] else 1.0
        # The fastest of the bare loops has no ratio: it is what the others are compared with.
        bare = next(float(row[1]) * unit for row in table if row[0].startswith("bare") and not row[4])
        ratio = next(row[4] for row in table if row[0] == "drivetrain")
        rows.append(f"| {name} | {bare:.3g} | x {ratio} |")
    return "\n".join(rows)


def releases() -> str:
    """Releases of other libraries that the tests ran with, from the file that `make test-oldest` can write."""
    worlds = json.loads((ROOT / "tests/releases/outcomes.json").read_text(encoding="utf-8"))
    oldest, newest = (worlds[name]["versions"] for name in ("oldest", "newest"))
    asked, locked = requirements(), locked_versions()
    dates = ", ".join(dict.fromkeys(worlds[name]["date"] for name in ("oldest", "newest")))
    rows = ["| library | asked for | lowest | locked | newest | date |", "|---" * 6 + "|"]
    for name, specifiers in asked.items():
        cells = (name, " and ".join(specifiers), *(found.get(name, "") for found in (oldest, locked, newest)), dates)
        rows.append(f"| {' | '.join(cells)} |")
    for name, found in worlds.items():
        if found["passed"] is None:
            rows.append(f"\n**{name}**, {found['date']}, Python {found['python']}: no complete run is recorded.")
            continue
        again = len(found["passed_when_run_again"])
        rows.append(
            f"\n**{name}**, {found['date']}, Python {found['python']}: {found['passed']} tests passed, "
            f"{found['skipped']} were skipped, {len(found['failed']) + again} failed, of which {again} passed when "
            "they were run again after a correction."
        )
        rows += ["", *(f"- fails: `{each}`" for each in found["failed"])] if found["failed"] else []
    return "\n".join(rows)


def requirements() -> dict[str, list[str]]:
    """By library, what our distributions ask for of it, then what only tests use; without torch_xla's."""
    found: dict[str, dict[str, None]] = {}
    for path in (ROOT / "core/pyproject.toml", ROOT / "kit/pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        extras = [] if path.parent.name == "xla" else project.get("optional-dependencies", {}).values()
        for one in map(Requirement, [*project["dependencies"], *(each for extra in extras for each in extra)]):
            if not one.name.startswith("drivetrain"):
                found.setdefault(canonicalize_name(one.name), {})[f"`{one.specifier}`"] = None
    asked = {name: sorted(found[name]) for name in sorted(found)}
    tools = (ROOT / "tests/releases/tools.txt").read_text(encoding="utf-8").splitlines()
    for one in (Requirement(line) for line in tools if line and not line.startswith("#")):
        asked.setdefault(canonicalize_name(one.name), ["by tests alone"])
    return asked


def locked_versions() -> dict[str, str]:
    """Version of each package in the lock; of Python 3.11, where others have others."""
    lines = (ROOT / "locks/dev.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    python = {"python_version": "3.11", "python_full_version": "3.11.9"}
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in pins
        if pin.marker is None or pin.marker.evaluate(python)
    }


def renewed(text: str, name: str, content: str) -> str:
    """The text with `content` between the marks of this name."""
    start, end = f"<!-- {name}: generated by `make docs` -->", f"<!-- end of {name} -->"
    head, found, rest = text.partition(start)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"the marks {start} and {end} are missing")
    return f"{head}{start}\n{content}\n{end}{tail}"


def documents() -> dict[Path, str]:
    """Every document with generated parts, as it should be."""
    readme, onboarding = ROOT / "README.md", ROOT / "docs/onboarding.md"
    tutorial = ROOT / "docs/tutorial/one-line.md"
    kit = ROOT / "docs/explanation/conformance.md"
    scripts = ROOT / "docs/explanation/parity.md"
    launching = ROOT / "docs/reference/launchers.md"
    with_trainer = ROOT / "docs/reference/trainer.md"
    matrix = ROOT / "docs/explanation/optimizers.md"
    tried = ROOT / "docs/reference/releases.md"
    plans = ROOT / "docs/reference/planner-memory.md"
    memory = renewed(plans.read_text(encoding="utf-8"), "counted memory", planned())
    memory = renewed(memory, "published memory", published())
    memory = renewed(memory, "memory on a device", on_device())
    ranking = ROOT / "docs/reference/planner-seconds.md"
    which = ROOT / "docs/how-to/which-backend.md"
    methods = ROOT / "docs/explanation/surface.md"
    numbering = renewed(launching.read_text(encoding="utf-8"), "launchers", launchers())
    tables = kit.read_text(encoding="utf-8")
    for name, table in (("runs of the kit", conformance()), ("cases", cases()), ("proofs", proofs())):
        tables = renewed(tables, name, table)
    return {
        readme: renewed(readme.read_text(encoding="utf-8"), "backends", backends()),
        onboarding: counted(renewed(onboarding.read_text(encoding="utf-8"), "tree", tree())),
        tutorial: renewed(tutorial.read_text(encoding="utf-8"), "runs", measured()),
        kit: tables,
        launching: renewed(numbering, "clusters", platforms()),
        scripts: renewed(scripts.read_text(encoding="utf-8"), "parity", parity()),
        matrix: renewed(matrix.read_text(encoding="utf-8"), "optimizers", optimizers()),
        plans: memory,
        ranking: renewed(ranking.read_text(encoding="utf-8"), "published seconds", published_seconds()),
        methods: renewed(methods.read_text(encoding="utf-8"), "surface", surface()),
        which: renewed(which.read_text(encoding="utf-8"), "speed", speed()),
        tried: renewed(tried.read_text(encoding="utf-8"), "releases", releases()),
        with_trainer: renewed(with_trainer.read_text(encoding="utf-8"), "runs of Trainer", trainer()),
    }


def long_pages() -> dict[Path, int]:
    """List how-tos that are longer than two high screens, with their lengths."""
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob("docs/how-to/*.md")}
    return {path: lines for path, lines in sorted(lengths.items()) if lines > TWO_SCREENS}


def main() -> None:
    """Rewrite them, and name the pages that are too long."""
    for path, text in documents().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"renewed {path.relative_to(ROOT)}\n")
    for path, lines in long_pages().items():
        name = path.relative_to(ROOT)
        sys.stdout.write(f"{name} has {lines} lines: split it by task, or move tables to docs/reference\n")


if __name__ == "__main__":
    main()
