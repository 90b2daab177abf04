"""What `sync_batch_norm` converts, what it leaves alone and refuses, and what is said where it is off."""

from __future__ import annotations

import copy
import logging
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.loop import batch_norm
from drivetrain.topology import Mesh, ProcessInfo, Topology
from drivetrain_testing import RankFailedError, spawn

TWO = Topology(ProcessInfo(world_size=2), Mesh({"dp_replicate": 2}), "cpu")


class Fused(nn.BatchNorm2d):
    """As in model libraries: the activation is in the layer."""

    def forward(self, given):
        return super().forward(given).relu()


class Slow(nn.BatchNorm1d):
    def __init__(self, features):
        super().__init__(features, momentum=0.01)


class Watched(nn.Module):
    """A model of every kind of normalisation."""

    def __init__(self):
        super().__init__()
        self.plain = nn.BatchNorm2d(3, momentum=None)
        self.bare = nn.BatchNorm1d(3, affine=False, track_running_stats=False)
        self.own = Slow(3)
        self.frozen = nn.BatchNorm3d(3).eval()
        self.others = nn.ModuleList(
            [nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.InstanceNorm2d(3, track_running_stats=True)]
        )


def backend(*, switched_on=False, device="cpu", topology=TWO):
    settings = SimpleNamespace(sync_batch_norm=switched_on)
    topology = Topology(topology.process, topology.mesh, device)
    made = SimpleNamespace(settings=settings, topology=topology)
    made.synchronise_batch_norm = lambda model: batch_norm.convert(model, topology)
    return made


def test_a_converted_layer_is_the_same_object_with_everything_it_had():
    model = Watched()
    calls = []
    model.plain.register_forward_hook(lambda *_: calls.append(1))
    before = dict((*model.named_parameters(), *model.named_buffers()))
    layers, kinds = dict(model.named_modules()), {name: type(one) for name, one in model.named_modules()}
    modes = {name: one.training for name, one in model.named_modules()}
    keys = list(model.state_dict())
    batch_norm.convert_or_warn(model, backend(switched_on=True), training=True)
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert all(after[name] is one for name, one in before.items())
    assert list(model.state_dict()) == keys
    assert modes == {name: one.training for name, one in model.named_modules()}
    assert model.plain.momentum is None
    assert model.own.momentum == 0.01
    for name, layer in model.named_modules():
        assert layer is layers[name]
        assert isinstance(layer, kinds[name])
        assert type(layer).__name__ == kinds[name].__name__
        assert isinstance(layer, batch_norm.Synchronised) == isinstance(layer, nn.modules.batchnorm._BatchNorm)
    # Without a process group, and in evaluation, it computes alone; its copies too.
    given = torch.randn(4, 3, 2, 2)
    expected = nn.BatchNorm2d(3, momentum=None)(given)
    for layer in (copy.deepcopy(model).plain, pickle.loads(pickle.dumps(model.frozen)), model.plain):
        assert isinstance(layer, batch_norm.Synchronised)
        if layer.training:
            assert torch.equal(layer(given), expected)
    assert calls == [1, 1]


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Fused(3), r"forward of their own: 0 \(Fused\) of Sequential"),
        (nn.LazyBatchNorm1d(), "lazy layer.* 0 of Sequential"),
    ],
)
def test_a_layer_that_computes_otherwise_is_refused_and_nothing_is_converted(layer, words):
    model = nn.Sequential(layer, nn.BatchNorm1d(3))
    with pytest.raises(UnsupportedError, match=words):
        batch_norm.convert_or_warn(model, backend(switched_on=True), training=True)
    assert type(model[1]) is nn.BatchNorm1d


def test_a_pipeline_is_refused():
    cut = Topology(ProcessInfo(world_size=4), Mesh({"pp": 2, "dp_replicate": 2}), "cpu")
    with pytest.raises(UnsupportedError, match="mesh axis pp"):
        batch_norm.convert(nn.Sequential(nn.BatchNorm1d(3)), cut)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.InstanceNorm1d, nn.Linear])
def test_models_without_batch_statistics_are_not_spoken_of(kind, caplog):
    model = nn.Sequential(kind(3, 3) if kind is nn.Linear else kind(3))
    batch_norm.convert_or_warn(model, backend(), training=True)
    assert not caplog.records


def test_local_statistics_are_said_aloud(caplog):
    model = nn.Sequential(nn.Linear(3, 3), *[nn.BatchNorm1d(3) for _ in range(6)])
    batch_norm.convert_or_warn(model, backend(), training=False)
    batch_norm.convert_or_warn(nn.Sequential(nn.BatchNorm1d(3)).requires_grad_(False), backend(), training=True)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        batch_norm.convert_or_warn(model, backend(), training=True)
    (record,) = caplog.records
    assert "6 batch norm layer(s) (1, 2, 3, 4 and 2 more)" in record.getMessage()
    assert "`sync_batch_norm: true`" in record.getMessage()


def test_torchs_own_layers_are_refused_where_they_do_not_run():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(UsageError, match=r"SyncBatchNorm \(0 of Sequential\) does not run on cpu"):
        batch_norm.convert_or_warn(model, backend(), training=True)
    batch_norm.convert_or_warn(model, backend(device="cuda"), training=True)
    batch_norm.convert_or_warn(model, backend(switched_on=True), training=True)
    assert isinstance(model[0], batch_norm.Synchronised)
    assert not isinstance(model[0], nn.SyncBatchNorm)


def penalised(parts):
    """Gradients of a gradient's square, which reach every rank's input."""
    layer = nn.BatchNorm1d(3).double()
    given = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)).double()
    if parts > 1:
        dist.init_process_group("gloo")
        process = ProcessInfo(rank=dist.get_rank(), world_size=parts)
        batch_norm.convert(layer, Topology(process, Mesh({"dp_replicate": parts}), "cpu"))
        given = given.split([1, *[8 // (parts - 1)] * (parts - 1)])[dist.get_rank()].clone()
    given.requires_grad_()
    (first,) = torch.autograd.grad(layer(given).tanh().sum(), given, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), given)
    result = layer.running_mean.clone(), layer.running_var.clone(), first.detach(), second
    if parts > 1:
        dist.destroy_process_group()
    return result


def test_gradients_of_gradients_and_batches_of_one_row():
    alone = penalised(1)
    ranks = spawn(penalised, 3, 3)
    for statistic in (0, 1):
        for rank in ranks:
            torch.testing.assert_close(rank[statistic], alone[statistic])
    for order in (2, 3):
        torch.testing.assert_close(torch.cat([rank[order] for rank in ranks]), alone[order])


def handed_to_torch():
    """Lets torch's layer and ours take the CPU for a device that torch's knows; its kernels are not there."""
    torch._C._get_privateuse1_backend_name = lambda: "cpu"
    handed = []

    class Kernels:
        @staticmethod
        def apply(given, *rest):
            handed.append(rest)
            return given

    torch.nn.modules.batchnorm.sync_batch_norm = Kernels
    dist.init_process_group("gloo")
    process = ProcessInfo(rank=dist.get_rank(), world_size=2)
    layer = nn.BatchNorm2d(3, momentum=None)
    batch_norm.convert(layer, Topology(process, Mesh({"dp_replicate": 2}), "cpu"))
    layer(torch.randn(4, 3, 2, 2))
    layer.eval()(torch.randn(4, 3, 2, 2))
    ((weight, _, running_mean, _, eps, factor, group, ranks),) = handed
    result = (
        weight is layer.weight,
        running_mean is layer.running_mean,
        eps,
        factor,
        group is dist.group.WORLD,
        ranks,
        int(layer.num_batches_tracked),
    )
    dist.destroy_process_group()
    return result


def test_torchs_kernels_compute_where_there_are_some():
    assert spawn(handed_to_torch, 2) == [(True, True, 1e-5, 1.0, True, 2, 1)] * 2


def uneven(switched_on):
    accelerator = Accelerator(cpu=True, distributed_type="ddp", sync_batch_norm=switched_on)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.train()
    with accelerator.join_uneven_inputs([model]):
        for _ in range(2 + accelerator.process_index):
            accelerator.backward(model(torch.randn(4, 3) + accelerator.process_index).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    result = model(torch.ones(1, 3)).tolist(), accelerator.sync_gradients
    accelerator.end_training()
    return result


def test_ranks_that_run_out_of_batches_agree_on_buffers_afterwards():
    one, other = spawn(uneven, 2, False)
    assert one == other


def test_whole_statistics_and_uneven_inputs_exclude_each_other():
    with pytest.raises(RankFailedError, match="every rank takes part in each training forward of Sequential") as failed:
        spawn(uneven, 2, True)
    assert isinstance(failed.value.cause, UnsupportedError)
