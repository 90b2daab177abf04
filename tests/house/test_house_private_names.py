"""A private name of another library is used only where its plugin checks that it is there."""

from __future__ import annotations

import ast
import re

OURS = re.compile(r"_drivetrain|_getframe$|_current_(frames|exceptions)$")
"""What is not another library's: our own marks, and Python's frames and exceptions."""

AT_IMPORT = {
    *("_dynamo", "_ops", "_subclasses"),  # Modules of torch; the first is imported when it is asked for.
    *("_foreach_norm", "_grouped_mm", "_is_any_true", "_local_scalar_dense"),  # Operators: torch names one it has not.
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_attention_math",),
    *("_bit_generator", "_reconstructor"),  # NumPy's and Python's, which keep what pickles contain.
}
"""Names whose absence is said where a module is imported or the name is read, with the library's own name."""

LOSS = re.compile(r"_saved_\w+|_input_metadata")
"""What autograd's nodes have kept, each by its kind; loop/loss.py asks for it."""


def trees(root):
    for place in ("core/src", "kit/src", "plugins"):
        for path in sorted((root / place).rglob("*.py")):
            if "/src/" in str(path):
                yield path, path.read_text(encoding="utf-8")


def defined(tree):
    """Private names that a module's own classes and functions define or set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "made", "view", "layer"):
                yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def used(text):
    """Private attributes of other objects than ``self``, which the linter would refuse."""
    lines = text.splitlines()
    attributes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute))
    for node in attributes:
        private = re.match(r"_[A-Za-z]", node.attr) and not node.attr.endswith("__")
        if private and any("SLF001" in line for line in lines[node.lineno - 1 : node.end_lineno]):
            yield node.attr


def test_every_private_name_is_checked_for(root):
    ours, declared, found = set(), set(), {}
    for path, text in trees(root):
        ours.update(name for name in defined(ast.parse(text)) if name.startswith("_"))
        if path.name in ("private_names.py", "torch_names.py"):
            constants = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            declared.update(node.value for node in constants if isinstance(node.value, str))
        for name in used(text):
            if not OURS.match(name) and not LOSS.fullmatch(name):
                found.setdefault(name, str(path.relative_to(root)))
    missing = {name: place for name, place in found.items() if name not in declared | ours | AT_IMPORT}
    assert not missing, f"list them in the private_names.py of their distribution: {missing}"


def test_the_release_that_an_error_names_is_the_locked_one(root):
    locked = dict(
        line.split(" ")[0].split("==")
        for lock in ("xla.txt", "dev.txt")
        for line in (root / "locks" / lock).read_text(encoding="utf-8").splitlines()
        if "==" in line and not line.startswith("#")
    )
    seen = set()
    for path, text in trees(root):
        released = dict(re.findall(r'^(TESTED\w*) = "([\d.]+)"$', text, re.MULTILINE))
        for library, named in re.findall(r'"?library"?[=:] ?"([\w-]+)",\s+"?tested"?[=:] ?(\w+)', text):
            assert released[named] == locked[library.replace("_", "-")], f"{path}: {library}"
            seen.add(library)
    assert seen == {"torch", "deepspeed", "megatron-core", "torch_xla", "transformers", "accelerate"}
