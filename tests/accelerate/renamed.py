"""Runs a script of an installed Accelerate with ``drivetrain`` in the place of ``accelerate``, one check after another.

Nothing but names changes: an import of ``accelerate.x`` gives ``drivetrain.x``, in the script alone, so that
Transformers and other libraries keep the package that they ask for. The helpers in ``accelerate.test_utils`` are read
from the installed package too, with their own imports renamed.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

THEIRS = "accelerate"
HELPERS = f"{THEIRS}.test_utils"

NOT_INSTALLED = ("evaluate",)
"""What scripts import for the parts that need accelerators and a network."""


def folder() -> Path:
    """Where the installed Accelerate keeps its test helpers."""
    spec = importlib.util.find_spec(THEIRS)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "test_utils"


def renamed(name: str) -> str:
    """``drivetrain.utils`` for ``accelerate.utils``; any other name as it is."""
    if name == f"{THEIRS}.accelerator":
        return "drivetrain"
    return "drivetrain" + name.removeprefix(THEIRS) if re.match(rf"{THEIRS}(\.|$)", name) else name


class _Late(ModuleType):
    """A module whose missing names are missed where they are used, so that the rest of a script can be judged.

    Args:
        name: of the module.
        module: where names are looked up; ``None`` for one that is not installed.
    """

    def __init__(self, name: str, module: ModuleType | None) -> None:
        super().__init__(name)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(self._module, name)
        except (AttributeError, ImportError) as error:
            said = error

        def fail(*_: Any, **__: Any) -> Any:
            raise ImportError(f"{self.__name__} has no {name}") from said

        return type(name, (), {"__new__": fail})


class _Helpers(ModuleType):
    """``accelerate.test_utils``: a name comes from the helper module that defines it, when it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for each in ("training", "testing"):
            module = _helper(f"{HELPERS}.{each}")
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)


@functools.cache
def _helper(name: str) -> ModuleType:
    """A helper module of the installed package, executed with renamed imports."""
    if name == HELPERS:
        return _Helpers(name)
    path = folder() / f"{name.rpartition('.')[2]}.py"
    module = ModuleType(name)
    vars(module).update(__file__=str(path), __package__=HELPERS, __builtins__=_builtins())
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), vars(module))
    return module


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,  # noqa: A002 (the names of __import__)
    locals: Mapping[str, Any] | None = None,  # noqa: A002
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """``__import__`` of the scripts."""
    if level:
        name, level = importlib.util.resolve_name("." * level + name, str((globals or {})["__package__"])), 0
    if name == HELPERS or name.startswith(f"{HELPERS}."):
        return _helper(name)
    if name in NOT_INSTALLED:
        return _Late(name, None)
    if renamed(name) == name:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    found = builtins.__import__(renamed(name))
    return _Late(name, sys.modules[renamed(name)]) if fromlist else found


def _builtins() -> dict[str, Any]:
    return {**vars(builtins), "__import__": _import}


IS_CHECK = re.compile(r"test_\w+|\w+_check|check_\w+")


class _Prepared(ast.NodeTransformer):
    """Marks the functions that are checks, and renames the loggers that are looked up by a string.

    A statement of ``main`` that fails outside of a check is written down, and what follows it is still run.
    """

    def visit_Module(self, node: ast.Module) -> ast.Module:
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and IS_CHECK.fullmatch(each.name):
                each.decorator_list.append(ast.Name("_drivetrain_check", ast.Load()))
            elif isinstance(each, ast.FunctionDef) and each.name == "main":
                self._watch(each)
        self.generic_visit(node)
        return node

    def _watch(self, block: Any) -> None:
        for name in ("body", "orelse"):
            statements = getattr(block, name, [])
            for place, each in enumerate(statements):
                if isinstance(each, ast.If | ast.For | ast.With):
                    self._watch(each)
                elif isinstance(each, ast.Expr | ast.Assign):
                    call = ast.Call(ast.Name("_drivetrain_outside", ast.Load()), [ast.Constant(each.lineno)], [])
                    handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Expr(call)])
                    statements[place] = ast.Try([each], [handler], [], [])

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and re.fullmatch(rf"{THEIRS}(\.\w+)+", node.value):
            node.value = f"drivetrain{node.value.removeprefix(THEIRS)}"
            logging.getLogger(node.value)
        return node


class Checks:
    """Counts the calls of checks, and writes down which have passed. A check within a check is a part of it.

    Args:
        progress: file to which a line of JSON is added where a check begins and where it has passed.
        passed_over: numbers of checks that are not run.
    """

    def __init__(self, progress: Path, passed_over: frozenset[int]) -> None:
        self._progress, self._passed_over = progress, passed_over
        self._number = -1
        self._inside = False
        self._failed = False

    def mark(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a check."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._number += 1
            number = self._number
            name = _label(function, args, kwargs)
            self._write(number, name, "passed over" if number in self._passed_over else "begun")
            if number in self._passed_over:
                return None
            self._inside = True
            try:
                result = function(*args, **kwargs)
            except BaseException:
                self._failed = True
                raise
            finally:
                self._inside = False
            self._write(number, name, "passed")
            return result

        return run

    def outside(self, line: int) -> None:
        """Write down that a statement of ``main`` failed, in the handler of its exception; one of a check goes on."""
        if self._failed:
            raise  # noqa: PLE0704 (called where an exception is handled)
        self._write(-line, f"(line {line} of main)", traceback.format_exc())

    def _write(self, number: int, name: str, event: str) -> None:
        with self._progress.open("a", encoding="utf-8") as file:
            file.write(json.dumps([number, name, event]) + "\n")


def _label(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Name and plain arguments of a call."""
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    plain = {name: str(value) for name, value in given.items() if isinstance(value, str | int | dict)}
    return f"{function.__name__}({', '.join(f'{name}={value}' for name, value in plain.items())})"


def run(
    script: str, extra: Sequence[tuple[str, Mapping[str, Any]]], progress: str, passed_over: frozenset[int]
) -> None:
    """Execute a script as the main program, in this rank.

    Args:
        script: file name in ``accelerate/test_utils/scripts``.
        extra: checks that the script leaves out on a CPU, called before it begins, with their arguments.
        progress: folder for the files of all ranks.
        passed_over: numbers of checks that are not run.
    """
    import os

    rank = os.environ.get("RANK", "0")
    os.chdir(progress)
    path = folder() / "scripts" / script
    checks = Checks(Path(progress, f"{rank}.jsonl"), passed_over)
    tree = ast.fix_missing_locations(_Prepared().visit(ast.parse(path.read_text(encoding="utf-8"))))
    module = ModuleType("__main__")
    vars(module).update(__file__=str(path), __builtins__=_builtins(), _drivetrain_check=checks.mark)
    vars(module)["_drivetrain_outside"] = checks.outside
    # What is pickled is found by the name of its module.
    sys.modules[module.__name__] = module
    sys.argv = [str(path)]
    code = compile(tree, path, "exec")
    if extra:
        exec(code, vars(module))
        for name, arguments in extra:
            vars(module)[name](**arguments)
    vars(module)["__name__"] = "__main__"
    exec(code, vars(module))
