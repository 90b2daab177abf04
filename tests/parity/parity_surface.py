"""Every public method of tensors, modules and optimizers, called on something prepared, in each place.

A script trains one step, calls one method of a parameter (or of the model, or its optimizer), and trains two more.
What the method returns, the weights and the losses are compared with plain torch. Arguments are the first of a list
with which the method runs on a plain tensor. Operators, attributes, assignments and functions that take a parameter are
written as a script writes them.
"""

from __future__ import annotations

import copy
import math
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity_common import Result, Script, build, loader, mean, result
from parity_worlds import PLACES, Matrix, together
from torch import Tensor, nn
from torch.nn import functional as F

OTHER_DEVICES = frozenset({"cuda", "hpu", "ipu", "mtia", "npu", "xpu", "to_mkldnn", "vulkan", "is_vulkan"})
"""Methods that need a device or library which is not everywhere."""

OF_MEMORY = frozenset(
    {"const_data_ptr", "data_ptr", "is_pinned", "is_set_to", "is_shared", "pin_memory", "record_stream", "share_memory"}
    | {"new_empty", "new_empty_strided", "share_memory_", "slice_inverse", "storage", "storage_type", "untyped_storage"}
)
"""Methods that tell of memory, which is each process's own, or of what lies in it."""

OF_OTHER_TENSORS = frozenset(
    {"backward", "module_load", "as_subclass", "sparse_mask", "sparse_resize_", "sparse_resize_and_clear_"}
    | {"map_", "map2_", "apply_", "reinforce", "new", "type", "retain_grad", "rename", "rename_", "align_to"}
    | {"align_as", "refine_names", "unflatten", "stft", "istft", "dim_order", "requires_grad_", "register_hook"}
    | {"to_sparse", "to_sparse_bsc", "to_sparse_bsr", "to_sparse_coo", "to_sparse_csc", "to_sparse_csr"}
    | {"register_post_accumulate_grad_hook", "storage_offset", "to_padded_tensor", "uniform"}
)
"""Methods of sparse, nested and named tensors, and those that other scripts show (backward, hooks, freezing)."""


def _arguments(tensor: Tensor) -> Iterator[tuple[Any, ...]]:
    """What methods are tried with, the simplest first."""
    rows = torch.tensor([0, 2, 1])
    plain = tensor.detach().clone()
    yield ()
    yield (0,)
    yield (2,)
    yield (0.5,)
    yield (plain,)
    yield (0, 1)
    yield (0, rows)
    yield (0, rows, plain[rows])
    yield (0, rows, 0.5)
    yield (plain.mean(),)
    yield (plain > 0,)
    yield (plain > 0, 0.5)
    yield (plain > 0, plain)
    yield (plain, plain)
    yield (plain, 0.5)
    yield (tuple(tensor.shape),)
    yield ((0,),)
    yield ((0,), (0,))
    yield (0, 0, 1)
    yield (plain.long().abs() % 2, 0)
    yield (0, torch.zeros_like(plain, dtype=torch.long))
    yield (0, torch.zeros_like(plain, dtype=torch.long), plain)
    yield (0, torch.zeros_like(plain, dtype=torch.long), plain, "sum")
    yield (0, rows, plain[rows], "amax")
    yield (2, 0, 1)
    yield (plain[0],)
    yield (plain.t(),)
    yield (torch.float64,)
    yield ((rows,), plain[rows])
    yield (plain[: len(plain) // 2],)
    yield (torch.tensor([0, 1]),)
    yield (torch.tensor([0, 1]), plain.flatten()[:2])
    yield ((2,), 0.5)
    yield (plain[0], 0, 1)


METHODS = sorted(
    name
    for name in dir(Tensor)
    if not name.startswith("_")
    and callable(getattr(Tensor, name))
    and name not in OTHER_DEVICES | OF_MEMORY | OF_OTHER_TENSORS
)


_WITHOUT_ARGUMENTS = """
acosh acosh_ addbmm addbmm_ addmv addmv_ addr_ arccosh arccosh_ as_strided_ as_strided_scatter baddbmm baddbmm_
bincount bitwise_and bitwise_and_ bitwise_left_shift bitwise_left_shift_ bitwise_not bitwise_not_ bitwise_or
bitwise_or_ bitwise_right_shift bitwise_right_shift_ bitwise_xor bitwise_xor_ bmm ccol_indices cholesky coalesce
col_indices cross crow_indices dsplit eig float_power_ gcd gcd_ indices int_repr is_coalesced is_nonzero item lcm lcm_
logdet lstsq lu_solve nonzero_static ormqr q_per_channel_axis q_per_channel_scales q_per_channel_zero_points q_scale
q_zero_point qscheme resize resize_ resize_as_ resize_as_sparse_ row_indices smm solve sspaddmm symeig unsqueeze_
values
"""
WITHOUT_ARGUMENTS = frozenset(_WITHOUT_ARGUMENTS.split())
"""Methods that arguments of the list do not suit, or whose results are not finite; a test finds the same ones."""


@cache
def arguments(name: str, dims: int) -> tuple[Any, ...] | None:
    """With which a method of a tensor of so many dims is called; ``None`` where none of the list suits it."""
    for given in _arguments(_like(dims)):
        tensor = nn.Parameter(_like(dims))
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                found = getattr(tensor, name)(*copy.deepcopy(given))
            finite = all(math.isfinite(each) for each in (*numbers(found), *numbers(tensor)))
            if not finite or tensor.shape != _like(dims).shape:
                continue
        except Exception:
            continue
        return given
    return None


def _like(dims: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.rand(*((16, 16) if dims == 2 else (16,)), generator=generator) / 4 + 0.1


class Net(nn.Module):
    """Square matrices, so that products and decompositions are defined; ``(B, 8) -> (B, 4)``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 4)
        with torch.no_grad():
            self.inner[2].weight.copy_(_like(2))
            self.inner[2].bias.copy_(_like(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def numbers(value: Any) -> list[float]:
    """What a method returned as numbers that can be compared. Collective where it is in parts."""
    if isinstance(value, Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        whole = whole.detach()
        if whole.layout is not torch.strided:
            whole = whole.to_dense()
        if whole.is_complex():
            whole = torch.view_as_real(whole.resolve_conj())
        return [float(len(whole.shape)), *whole.double().flatten().tolist()]
    if isinstance(value, (bool, int, float)):
        return [float(value)]
    if isinstance(value, complex):
        return [value.real, value.imag]
    if isinstance(value, (list, tuple)):
        return [number for each in value for number in numbers(each)]
    if isinstance(value, dict):
        return [number for key in sorted(value, key=str) for number in numbers(value[key])]
    if hasattr(value, "tolist"):
        return numbers(value.tolist())
    text = value if isinstance(value, str) else repr(value) if _tells(value) else type(value).__name__
    return [float(zlib.crc32(text.encode()) % 1000)]


def _tells(value: Any) -> bool:
    return value is None or isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format))


def _train(accelerator: Any, call: Callable[[Any, Any], list[float]]) -> Result:
    model = build(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses: list[float] = []
    for step, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(accelerator, loss))
        if step == 0:
            torch.manual_seed(1)
            losses += together(accelerator, lambda: call(model, optimizer))
        if step == 2:
            break
    return result(accelerator, losses, model=model)


@cache
def dims_of(name: str) -> int | None:
    """Whether the method is called on a matrix, which is tried first, or a vector; ``None``: on neither."""
    return next((each for each in (2, 1) if arguments(name, each) is not None), None)


def _of_tensor(name: str, accelerator: Any) -> Result:
    dims = dims_of(name)
    assert dims is not None, f"no arguments suit {name}"

    def call(model: Any, _optimizer: Any) -> list[float]:
        parameter = model.inner[2].weight if dims == 2 else model.inner[2].bias
        with torch.no_grad():
            found = getattr(parameter, name)(*copy.deepcopy(arguments(name, dims)))
        # What is written in place is compared as the weights are: of a pipeline's ranks one alone has the values.
        return [float(found.ndim)] if name.endswith("_") and isinstance(found, Tensor) else numbers(found)

    return _train(accelerator, call)


_EXPRESSIONS = """
p + plain ; plain + p ; p - 1 ; 1 - p ; p * 2 ; 2 * p ; p / 2 ; 1 / p ; p // 0.07 ; p % 0.07 ; p ** 2 ; 2 ** p ; -p
+p ; abs(p) ; p @ plain ; plain @ p ; ~(p > 0.2) ; (p > 0.2) & (p < 0.3) ; (p > 0.2) | (p < 0.1)
(p > 0.2) ^ (p < 0.3) ; p == plain ; p != plain ; p < plain ; p <= plain ; p > plain ; p >= plain ; p[0] ; p[-1]
p[0, 1] ; p[1:3] ; p[:, 1] ; p[..., 0] ; p[None] ; p[::2] ; p[rows] ; p[:, rows] ; p[p > 0.2] ; p[rows, rows]
p[torch.tensor(1)] ; len(p) ; list(p) ; 0.5 in p ; list(reversed(p)) ; sum(p) ; max(p[0]) ; sorted(p[0])
bool(p.sum() > 0) ; float(p.sum()) ; int(p.sum()) ; complex(p.sum()) ; f'{p.mean():.2f}' ; round(float(p.mean()), 3)
list(range(p[0].argmax() + 1)) ; [row.sum() for row in p] ; math.sqrt(p.mean()) ; np.asarray(p.detach())
np.array(p.detach())[0] ; np.mean(p.detach().numpy()) ; copy.copy(p) ; copy.deepcopy(p)
pickle.loads(pickle.dumps(p)) ; pickle.loads(pickle.dumps(p.detach())) ; isinstance(p, nn.Parameter)
isinstance(p, Tensor) ; hash(p) == hash(p)
p in {p: 1} ; {p: 2}[p] ; p.T ; p.mT ; p.H ; p.mH ; p.real ; p.shape ; p.shape[0] ; p.ndim ; p.dtype ; p.device.type
p.layout ; p.itemsize ; p.nbytes ; p.is_leaf ; p.requires_grad ; p.grad is None ; p.grad_fn is None ; p.is_sparse
p.data ; p.data.mean() ; p.data[0] ; p.name ; p.output_nr ; p.retains_grad ; p.is_cpu ; p.is_meta ; p.is_quantized
p.is_nested ; p.is_cuda ; torch.cat([p, plain]) ; torch.stack([p, p]) ; torch.where(p > 0.2, p, plain)
torch.einsum('ij,kj->ik', p, plain) ; F.linear(plain, p) ; torch.equal(p, p) ; F.cosine_similarity(p, plain)
F.mse_loss(p, plain) ; torch.norm(p) ; torch.linalg.norm(p) ; torch.dist(p, p) ; torch.linalg.matrix_norm(p, 'nuc')
torch.linalg.svdvals(p) ; torch.allclose(p, plain) ; torch.numel(p) ; torch.is_tensor(p) ; torch.zeros_like(p)
torch.full_like(p, 2.0) ; torch.empty_like(p).shape ; torch.rand_like(p).shape ; torch.histc(p, 4)
torch.topk(p.flatten(), 3).values ; torch.outer(p[0], p[1]) ; torch.tensor(p[0].tolist()) ; torch.as_tensor(p)
torch.Tensor(p) ; torch.block_diag(p, p) ; torch.vstack([p, p]) ; nn.utils.parameters_to_vector([p])
nn.utils.get_total_norm([p]) ; torch._foreach_norm([p, p])
"""
EXPRESSIONS = [text for line in _EXPRESSIONS.split("\n")[1:-1] for text in line.split(" ; ")]
"""Expressions of a parameter ``p``, of ``plain``, which has other values, and of three ``rows``."""

_STATEMENTS = """
p[0] = 1 ; p[rows] = 0.5 ; p[p > 0.2] = 0 ; p[:, 1] = plain[0] ; p[0, 1] = 2 ; p[1:3] = plain[1:3] ; p[...] = plain
p += 1 ; p += plain ; p -= plain ; p *= 0.5 ; p /= 2 ; p **= 2 ; p %= 0.07 ; p //= 0.07 ; p.data = plain
p.data[0] = 1 ; p.data += 1 ; p.data *= 0.5 ; p.data[:] = plain ; p.data[p > 0.2] = 0 ; p.grad = torch.zeros_like(p)
p.grad = plain.clone() ; p.requires_grad = True ; p.mine = 3 ; p[0] += 1 ; p.copy_(plain) ; p.data.copy_(plain)
torch.add(p, 1, out=p) ; torch.mul(p, plain, out=p) ; nn.init.zeros_(p) ; nn.init.constant_(p, 0.3) ; nn.init.eye_(p)
nn.init.xavier_uniform_(p) ; nn.init.normal_(p, std=0.02) ; nn.init.kaiming_uniform_(p) ; nn.init.orthogonal_(p)
nn.init.trunc_normal_(p) ; torch._foreach_mul_([p], 0.5) ; torch._foreach_add_([p], [plain])
nn.utils.vector_to_parameters(p.flatten() / 2, [p])
"""
STATEMENTS = [text for line in _STATEMENTS.split("\n")[1:-1] for text in line.split(" ; ")]
"""Statements that write to the same."""


def _of_script(compiled: Any, accelerator: Any) -> Result:
    def call(model: Any, _optimizer: Any) -> list[float]:
        names = {"p": model.inner[2].weight, "plain": _like(2).flip(0) / 3, "rows": torch.tensor([0, 2, 1])}
        modules = {"F": F, "Tensor": Tensor, "copy": copy, "math": math, "nn": nn, "np": np, "pickle": pickle}
        with torch.no_grad():
            return numbers(eval(compiled, {"torch": torch, **modules, **names}))

    return _train(accelerator, call)


def _names(values: Any) -> list[float]:
    return numbers([name for name, _ in values])


MODULE: dict[str, Callable[[Any], list[float]]] = {
    "add_module": lambda m: numbers(m.add_module("extra", nn.Identity())),
    "apply": lambda m: numbers([m.apply(lambda part: None) is m]),
    "bfloat16": lambda m: _dtypes(m, m.bfloat16),
    "buffers": lambda m: numbers(len(list(m.buffers()))),
    "children": lambda m: numbers([type(each).__name__ for each in m.children()]),
    "compile": lambda m: numbers(m.compile(backend="eager")),
    "cpu": lambda m: numbers(m.cpu() is m),
    "double": lambda m: _dtypes(m, m.double),
    "eval": lambda m: numbers([m.eval().training, m.train().training]),
    "extra_repr": lambda m: numbers(m.extra_repr()),
    "float": lambda m: numbers(m.float() is m),
    "forward": lambda m: _no_grad(lambda: m.forward(torch.ones(2, 8)).mean()),
    "get_buffer": lambda m: numbers(_raises(lambda: m.get_buffer("none"))),
    "get_extra_state": lambda m: numbers(_raises(m.get_extra_state)),
    "get_parameter": lambda m: numbers(list(m.get_parameter("head.bias").shape)),
    "get_submodule": lambda m: numbers(type(m.get_submodule("inner.0")).__name__),
    "half": lambda m: _dtypes(m, m.half),
    "load_state_dict": lambda m: numbers(len(m.load_state_dict(m.state_dict()).missing_keys)),
    "modules": lambda m: numbers([type(each).__name__ for each in m.inner.modules()]),
    "named_buffers": lambda m: _names(m.named_buffers()),
    "named_children": lambda m: _names(m.named_children()),
    "named_modules": lambda m: _names(m.named_modules()),
    "named_parameters": lambda m: _names(m.named_parameters()),
    "parameters": lambda m: numbers([list(each.shape) for each in m.parameters()]),
    "register_backward_hook": lambda m: _handle(m.register_backward_hook),
    "register_buffer": lambda m: numbers(m.register_buffer("seen", torch.ones(2))),
    "register_forward_hook": lambda m: _handle(m.register_forward_hook),
    "register_forward_pre_hook": lambda m: _handle(m.register_forward_pre_hook),
    "register_full_backward_hook": lambda m: _handle(m.register_full_backward_hook),
    "register_full_backward_pre_hook": lambda m: _handle(m.register_full_backward_pre_hook),
    "register_load_state_dict_post_hook": lambda m: _handle(m.register_load_state_dict_post_hook),
    "register_load_state_dict_pre_hook": lambda m: _handle(m.register_load_state_dict_pre_hook),
    "register_module": lambda m: numbers(m.register_module("extra", nn.Identity())),
    "register_parameter": lambda m: numbers(m.register_parameter("extra", None)),
    "register_state_dict_post_hook": lambda m: _handle(m.register_state_dict_post_hook),
    "register_state_dict_pre_hook": lambda m: _handle(m.register_state_dict_pre_hook),
    "requires_grad_": lambda m: numbers(m.requires_grad_(True) is m),
    "set_extra_state": lambda m: numbers(_raises(lambda: m.set_extra_state(None))),
    "set_submodule": lambda m: numbers(m.set_submodule("inner.1", nn.Tanh())),
    "state_dict": lambda m: numbers(m.state_dict()),
    "to": lambda m: numbers(m.to("cpu") is m),
    "to dtype": lambda m: _dtypes(m, lambda: m.to(torch.float64)),
    "train": lambda m: numbers(m.train() is m),
    "type": lambda m: numbers(m.type(torch.float32) is m),
    "zero_grad": lambda m: numbers(m.zero_grad()),
    "copy.deepcopy": lambda m: numbers(copy.deepcopy(m).state_dict()),
    "repr": lambda m: numbers(repr(m)),
    "parameters_to_vector": lambda m: numbers(nn.utils.parameters_to_vector(m.parameters())),
}
"""By name, what is called on a prepared model and looked at."""


MODULE_LEFT_OUT = {
    "T_destination": "no method",
    "call_super_init": "no method",
    "dump_patches": "no method",
    **dict.fromkeys(("cuda", "ipu", "mtia", "xpu"), "of another device"),
    "share_memory": "of memory, which is each process's own",
    "to_empty": "its values are not defined",
}
"""Public names of ``nn.Module`` that are not called, and why."""


def _no_grad(call: Callable[[], Any]) -> list[float]:
    with torch.no_grad():
        return numbers(call())


def _dtypes(model: Any, convert: Callable[[], Any]) -> list[float]:
    """Of its parameters, converted and back."""
    names = [str(each.dtype) for each in convert().parameters()]
    model.float()
    return numbers(names)


def _raises(call: Callable[[], Any]) -> str:
    try:
        call()
    except (AttributeError, RuntimeError) as problem:
        return type(problem).__name__
    return ""


OPTIMIZER: dict[str, Callable[[Any, Any], list[float]]] = {
    "add_param_group": lambda o, m: numbers(o.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})),
    "load_state_dict": lambda o, m: numbers(o.load_state_dict(o.state_dict())),
    "param_groups": lambda o, m: numbers([(len(group["params"]), group["lr"]) for group in o.param_groups]),
    "param_groups of a rate": lambda o, m: numbers([group.update(lr=0.01) for group in o.param_groups]),
    "profile_hook_step": lambda o, m: numbers(callable(o.profile_hook_step)),
    "register_load_state_dict_post_hook": lambda o, m: _handle(o.register_load_state_dict_post_hook),
    "register_load_state_dict_pre_hook": lambda o, m: _handle(o.register_load_state_dict_pre_hook),
    "register_state_dict_post_hook": lambda o, m: _handle(o.register_state_dict_post_hook),
    "register_state_dict_pre_hook": lambda o, m: _handle(o.register_state_dict_pre_hook),
    "register_step_post_hook": lambda o, m: _handle(o.register_step_post_hook),
    "register_step_pre_hook": lambda o, m: _handle(o.register_step_pre_hook),
    "state of a parameter": lambda o, m: numbers(o.state[m.head.bias]["momentum_buffer"]),
    # How many states there are is the engine's own.
    "state_dict": lambda o, m: numbers([bool(o.state_dict()["state"]), len(o.state_dict()["param_groups"])]),
    "zero_grad": lambda o, m: numbers(o.zero_grad(set_to_none=False)),
    "defaults": lambda o, m: numbers(o.defaults["momentum"]),
}
"""By name, what is called on a prepared optimizer, its model beside it."""

OPTIMIZER_LEFT_OUT = {
    **dict.fromkeys(("OptimizerPreHook", "OptimizerPostHook"), "no method"),
    "step": "every script calls it; a second one without a backward is refused, on one process too",
}
"""Public names of ``Optimizer`` that are not called, and why."""


def _handle(register: Callable[..., Any]) -> list[float]:
    return numbers(type(register(lambda *_: None)).__name__)


def _of_module(name: str, accelerator: Any) -> Result:
    return _train(accelerator, lambda model, _: MODULE[name](model))


def _of_optimizer(name: str, accelerator: Any) -> Result:
    return _train(accelerator, lambda model, optimizer: OPTIMIZER[name](optimizer, model))


@cache
def load() -> dict[str, Script]:
    """A script for each method that arguments of the list suit."""
    found: dict[str, Callable[[Any], Result]] = {
        f"Tensor.{name}": partial(_of_tensor, name) for name in METHODS if name not in WITHOUT_ARGUMENTS
    }
    for kind, mode, texts in (("Expression", "eval", EXPRESSIONS), ("Statement", "exec", STATEMENTS)):
        found |= {f"{kind}.{text}": partial(_of_script, compile(text, text, mode)) for text in texts}
    found |= {f"Module.{name}": partial(_of_module, name) for name in MODULE}
    found |= {f"Optimizer.{name}": partial(_of_optimizer, name) for name in OPTIMIZER}
    return {name: Script(name, train) for name, train in found.items()}


NAMES = ("single", "ddp-2", "fsdp-2", "deepspeed-1", "deepspeed-2", "deepspeed-3", "tp-2", "pp-2")
MATRIX = Matrix(load, {name: PLACES[name] for name in NAMES}, Path(__file__).with_name("surface.json"))
