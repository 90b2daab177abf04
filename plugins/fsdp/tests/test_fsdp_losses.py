"""Losses that join sharded parameters, outside of a forward, with plain tensors that differ from rank to rank.

Scripts of tests/parity show the usual ones: penalties before a forward, scaled by the loss, on one vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from drivetrain import Accelerator, load_config
from drivetrain_testing import spawn
from drivetrain_testing.processes import RankFailedError

WORLD = 3

ROWS = torch.arange(WORLD * 2 * 4.0).reshape(-1, 4).sin()


def built() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 5)


def rows_of_a_weight(model: Any, x: Tensor) -> Tensor:
    """A penalty that reads plain rows of the batch beside a part of a sharded matrix."""
    penalty = (model.weight[1] * x).sum(-1).mean() + (model.weight * 2 - torch.ones(5, 4)).pow(2).mean()
    return model(x).pow(2).mean() + penalty


def other_layout(model: Any, x: Tensor) -> Tensor:
    """A penalty alone, whose gradient has another layout than the parameters."""
    del x
    vector = torch.cat([model.weight.reshape(-1), model.bias])
    total: Tensor = (vector * vector.detach().roll(1)).sum()
    return total


def chosen(model: Any, x: Tensor) -> Tensor:
    """The loss of the batch counts where a norm of the weights says so."""
    norm = (model.weight * 1).norm()
    loss = model(x).pow(2).mean()
    return torch.where(norm > 0, loss * norm.detach(), loss) + torch.maximum(norm, loss.detach() * 0)


def of_pieces(model: Any, x: Tensor) -> Tensor:
    """Penalties whose backward makes plain tensors: zeros for a piece that is not used, masks of a product."""
    weight, bias = model.weight, model.bias
    used = weight.chunk(2)[0].pow(2).sum() + torch.stack([bias, 2 * bias + 1]).prod(0).sum()
    return model(x).pow(2).mean() + used + bias.cumprod(0).sum()


def of_norms(model: Any, x: Tensor) -> Tensor:
    """A group lasso and sums of norms, of which each rank finds a part; the greatest number of a vector."""
    weight, bias = model.weight, model.bias
    norms = torch.stack([weight.norm(), bias.norm(), bias.norm(0)]).sum() + bias.norm(float("inf"))
    total: Tensor = model(x).pow(2).mean() + weight.norm(dim=0).sum() + norms + bias.sum([], keepdim=True).sum()
    return total


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    each.__name__: each for each in (rows_of_a_weight, other_layout, chosen, of_pieces, of_norms)
}


def gradients(loss: str) -> dict[str, Tensor]:
    """Return the full gradients that two backwards add up."""
    accelerator, model = accelerator_and_model(built())
    mine = ROWS.chunk(WORLD)[accelerator.process_index]
    for _ in range(2):
        accelerator.backward(LOSSES[loss](model, mine))
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_one_process(loss: str) -> None:
    reference = built()
    for _ in range(2):
        LOSSES[loss](reference, ROWS).backward()
    for found in spawn(gradients, WORLD, loss):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=2e-5, atol=1e-6, msg=name)


def accelerator_and_model(layer: nn.Linear) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "fsdp", "use_cpu": True}, environ={}))
    return accelerator, accelerator.prepare(layer)


def numbers_of_few_rows(layer: nn.Linear) -> list[float]:
    """Numbers of parameters of which some rank holds no row."""
    found = [each for p in layer.parameters() for each in (p.max(), p.abs().amax(), p.min(), p.prod(), p.median())]
    found += [layer.weight.norm(float("inf")), layer.weight.argmax(), layer.bias.std(correction=0)]
    return [float(each.detach()) for each in found]


def of_few_rows() -> list[float]:
    torch.manual_seed(3)
    _, model = accelerator_and_model(nn.Linear(4, 2))
    return numbers_of_few_rows(model)


def test_reductions_where_a_rank_holds_no_row() -> None:
    torch.manual_seed(3)
    right = numbers_of_few_rows(nn.Linear(4, 2))
    for found in spawn(of_few_rows, WORLD):
        assert found == pytest.approx(right, rel=1e-6)


def several_changed_at_once(layer: nn.Linear) -> Tensor:
    """Return what operations on a list of parameters leave."""
    parameters = list(layer.parameters())
    with torch.no_grad():
        torch._foreach_mul_(parameters, [2.0] * 2)
        torch._foreach_add_(parameters, parameters, alpha=0.5)
        norms = torch._foreach_norm(parameters)
        torch._foreach_div_(parameters, torch.stack(norms).sum())
        return torch.cat([each.reshape(-1) for each in parameters])


def changed_of_few_rows() -> Tensor:
    torch.manual_seed(3)
    _, model = accelerator_and_model(nn.Linear(4, 2))
    return several_changed_at_once(model).full_tensor()


def test_operations_on_a_list_where_a_rank_holds_no_row() -> None:
    torch.manual_seed(3)
    right = several_changed_at_once(nn.Linear(4, 2))
    for found in spawn(changed_of_few_rows, WORLD):
        torch.testing.assert_close(found, right)


def stepped(foreach: bool) -> Tensor:
    torch.manual_seed(3)
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "fsdp", "use_cpu": True}, environ={}))
    layer: Any = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(layer, torch.optim.AdamW(layer.parameters(), lr=0.1, foreach=foreach))
    accelerator.backward(model(ROWS).pow(2).mean())
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return torch.cat([each.full_tensor().reshape(-1) for each in model.parameters()])


def test_an_optimizer_of_lists_steps_where_a_rank_holds_no_row() -> None:
    torch.manual_seed(3)
    layer = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, foreach=True)
    layer(ROWS).pow(2).mean().backward()
    nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
    optimizer.step()
    right = torch.cat([each.detach().reshape(-1) for each in layer.parameters()])
    for found in spawn(stepped, WORLD, True):
        torch.testing.assert_close(found.detach(), right, rtol=2e-5, atol=1e-6)


def changed_in_place() -> None:
    accelerator, model = accelerator_and_model(built())
    total = model.weight.pow(2).sum()
    total.add_(model(ROWS).pow(2).mean())
    accelerator.backward(total)


def test_what_became_plain_in_place_is_refused_where_it_is_used() -> None:
    with pytest.raises(RankFailedError, match=r"Write `total = total \+ loss`"):
        spawn(changed_in_place, 2)


def scaled_by_the_last_loss(factor: float | None) -> dict[str, Tensor]:
    """Gradients of a penalty that each rank scales by a number of its own rows, and of the loss."""
    accelerator, model = accelerator_and_model(built())
    mine = ROWS.chunk(WORLD)[accelerator.process_index]
    weight = model.weight if factor is None else factor * model.weight
    penalty = (mine.mean() * weight * weight).sum()
    accelerator.backward(model(mine).pow(2).mean() + penalty)
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


def test_a_number_of_each_rank_scales_what_was_computed_from_a_parameter() -> None:
    with pytest.raises(RankFailedError, match=r"Write `1 \* parameter`"):
        spawn(scaled_by_the_last_loss, WORLD, None)
    reference = built()
    (reference(ROWS).pow(2).mean() + (ROWS.mean() * reference.weight * reference.weight).sum()).backward()
    for found in spawn(scaled_by_the_last_loss, WORLD, 1):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=2e-5, atol=1e-6, msg=name)


def scaled_in_a_hook(differ: str | None) -> dict[str, Tensor]:
    """Gradients of a penalty that a hook scales row by row, by plain numbers of which values or shapes may differ."""
    accelerator, model = accelerator_and_model(built())
    scales = torch.arange(20.0).reshape(5, 4)
    if differ == "values":
        scales = scales + accelerator.process_index
    elif differ == "shapes" and accelerator.process_index:
        scales = scales[:1]
    weight = 1 * model.weight
    weight.register_hook(lambda grad: grad * scales)
    accelerator.backward(model(ROWS).pow(2).mean() + weight.pow(2).sum())
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


def test_a_hook_scales_a_gradient_by_plain_numbers_that_are_alike_on_all_ranks() -> None:
    for differ in ("values", "shapes"):
        with pytest.raises(RankFailedError, match="beside a plain tensor"):
            spawn(scaled_in_a_hook, WORLD, differ)
    reference = built()
    weight = 1 * reference.weight
    weight.register_hook(lambda grad: grad * torch.arange(20.0).reshape(5, 4))
    (reference(ROWS).pow(2).mean() + weight.pow(2).sum()).backward()
    for found in spawn(scaled_in_a_hook, WORLD, None):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=2e-5, atol=1e-6, msg=name)


def rows_beside_a_parameter(factor: float | None) -> dict[str, Tensor]:
    """Gradients of a loss that multiplies a parameter with plain rows, outside of the forward."""
    accelerator, model = accelerator_and_model(built())
    mine = ROWS.chunk(WORLD)[accelerator.process_index]
    weight = model.weight if factor is None else factor * model.weight
    accelerator.backward(model(mine).pow(2).mean() + linear(mine, weight).pow(2).mean())
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


def test_rows_meet_what_was_computed_from_a_parameter() -> None:
    with pytest.raises(RankFailedError, match=r"In a loss beside it write `1 \* p`"):
        spawn(rows_beside_a_parameter, WORLD, None)
    reference = built()
    (reference(ROWS).pow(2).mean() + (ROWS @ reference.weight.t()).pow(2).mean()).backward()
    for found in spawn(rows_beside_a_parameter, WORLD, 1):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=2e-5, atol=1e-6, msg=name)


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = built(), nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def tempered() -> dict[str, Tensor]:
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "fsdp", "use_cpu": True}, environ={}))
    model: Any = accelerator.prepare(Tempered())
    mine = ROWS.chunk(WORLD)[accelerator.process_index]
    temperature = model.temperature
    accelerator.backward((model(mine).pow(2).mean() * temperature).sum() + temperature.pow(2).sum())
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


def test_a_parameter_of_one_element_scales_a_loss() -> None:
    reference = Tempered()
    ((reference(ROWS).pow(2).mean() * reference.temperature).sum() + reference.temperature.pow(2).sum()).backward()
    for found in spawn(tempered, WORLD):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=2e-5, atol=1e-6, msg=name)


def set_gradients(step: Any) -> Any:
    """Train a step beside a gradient that the script has set, and return the weight."""
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "fsdp", "use_cpu": True}, environ={}))
    model = built()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(accelerator, model, ROWS[accelerator.process_index * 2 :][:2])
    optimizer.step()
    whole = model.weight.full_tensor().detach()
    accelerator.end_training()
    return whole


def sets_a_plain_gradient(accelerator: Any, model: Any, x: Tensor) -> None:
    model.weight.grad = torch.ones(5, 4)
    accelerator.backward(model(x).pow(2).mean())


def sets_none_first(accelerator: Any, model: Any, x: Tensor) -> None:
    model.weight.grad = torch.ones(5, 4)
    model.weight.grad = None
    accelerator.backward(model(x).pow(2).mean())


def copies_into_it(accelerator: Any, model: Any, x: Tensor) -> None:
    accelerator.backward(model(x).pow(2).mean())
    model.weight.grad.copy_(torch.ones(5, 4))


def test_a_plain_gradient_is_refused_with_what_to_write() -> None:
    with pytest.raises(RankFailedError, match=r"p\.grad of a sharded parameter was set to a plain tensor") as caught:
        spawn(set_gradients, WORLD, sets_a_plain_gradient)
    assert "Write `p.grad = None` before the backward, or after one `p.grad.copy_(value)`" in str(caught.value)


def test_what_it_advises_sets_the_gradient() -> None:
    plain = built()
    plain(ROWS).pow(2).mean().backward()
    for whole in spawn(set_gradients, WORLD, sets_none_first):
        torch.testing.assert_close(whole, plain.weight - 0.1 * plain.weight.grad, rtol=0, atol=1e-5)
    for whole in spawn(set_gradients, WORLD, copies_into_it):
        torch.testing.assert_close(whole, plain.weight - 0.1, rtol=0, atol=1e-6)


def multiplied(factor: Tensor) -> Any:
    """Write a product with a plain tensor into a sharded parameter."""
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "fsdp", "use_cpu": True}, environ={}))
    model = accelerator.prepare(built())
    with torch.no_grad():
        found = torch.mul(model.weight, factor, out=model.weight)
    whole = model.weight.full_tensor()
    accelerator.end_training()
    return found is not None, whole


def test_a_product_with_a_plain_tensor_is_written_to_a_shard() -> None:
    factor = torch.arange(20.0).reshape(5, 4)
    for returned, whole in spawn(multiplied, WORLD, factor):
        assert returned
        torch.testing.assert_close(whole, built().weight.detach() * factor, rtol=0, atol=0)


class Mixed(nn.Module):
    """A complex parameter in a module whose other ones are real, so that fsdp leaves it whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.rotation = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        product = x.to(torch.complex64) @ self.rotation
        return product.real.sin() + product.imag.cos() + self.layer(x)


def steps_a_complex_parameter() -> Any:
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "fsdp", "use_cpu": True}, environ={}))
    model: Any = Mixed()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank = accelerator.process_index
    accelerator.backward(model(ROWS[2 * rank : 2 * rank + 2]).pow(2).mean())
    optimizer.step()
    stepped = model.rotation.detach().clone()
    accelerator.end_training()
    return stepped


def test_the_gradient_of_a_complex_parameter_beside_real_ones_is_complex() -> None:
    plain = Mixed()
    plain(ROWS).pow(2).mean().backward()
    assert plain.rotation.grad is not None
    for stepped in spawn(steps_a_complex_parameter, WORLD):
        torch.testing.assert_close(stepped, plain.rotation.detach() - 0.1 * plain.rotation.grad, rtol=0, atol=1e-5)
