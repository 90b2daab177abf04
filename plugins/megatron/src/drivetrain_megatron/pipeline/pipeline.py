"""Runs a model as a pipeline: training by torch's schedules, evaluation stage by stage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.api import DrivetrainError, TorchEngine, UnsupportedError, UsageError
from drivetrain.api.engines import autocast, call_plainly, numbers_coordinate
from drivetrain_megatron import agreement
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.module_state import once, without_gradients
from drivetrain_megatron.pipeline import hooks, replay, schedules, script_writes
from drivetrain_megatron.pipeline.batches import Rows, cut
from drivetrain_megatron.pipeline.calls import ModelCall
from drivetrain_megatron.pipeline.compiling import WholeBatchError, uncut
from drivetrain_megatron.pipeline.deferred import Deferred, Node, read
from drivetrain_megatron.pipeline.parting import Share
from drivetrain_megatron.pipeline.passage import Passage
from drivetrain_megatron.pipeline.planning import Arguments, Planner
from drivetrain_megatron.pipeline.programs import Programs
from drivetrain_megatron.pipeline.randomness import host_digest, own_numbers
from drivetrain_megatron.pipeline.reductions import Adjusting, Reduction
from drivetrain_megatron.pipeline.running import StageRun
from drivetrain_megatron.pipeline.skeleton import Elsewhere, is_absent
from drivetrain_megatron.pipeline.transport import Stage, StageModule
from drivetrain_megatron.pipeline.trying import Trials, failed, size_along
from drivetrain_megatron.pipeline.values import Meta, leaves, rebuilt
from drivetrain_megatron.pipeline.work import Work, check

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_GIVEN = ("the model's inputs", "what its loss is computed with")


@final
class Pipeline:
    """One model over the ranks of one pipeline.

    Args:
        model: what is called (behind ``torch.compile`` or not).
        module: the user's module.
        engine: precision and loss scaling.
        section: the configuration.
        group: the ranks of the pipeline.
        device: of this rank.
        on_cut: called once with the assignment, after the first inputs.
        tensor_group: the ranks of the axis ``tp``; ``None`` where there is one.
        data_group: data-parallel ranks that hold shards of the parameters, without which no forward runs.
        replica: the data-parallel coordinate of this pipeline.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        engine: TorchEngine,
        section: MegatronConfig,
        group: dist.ProcessGroup,
        device: str,
        on_cut: Callable[[Share], None],
        tensor_group: dist.ProcessGroup | None = None,
        data_group: dist.ProcessGroup | None = None,
        replica: int = 0,
    ) -> None:
        self._model, self._module, self._engine, self._section = model, module, engine, section
        self._called = (model,) if model is module else (model, module)
        self._group, self._device, self._on_cut = group, torch.device(device), on_cut
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._replica = replica
        num_stages = self.num_ranks * schedules.stages_per_rank(section)
        schedules.wanted_parts(section, self.num_ranks)
        self.planner = Planner(module, engine, section, num_stages, self._device)
        self._rank_of = [schedules.rank_of_stage(section, stage, self.num_ranks) for stage in range(num_stages)]
        self._alike = (group, tensor_group)
        # Data-parallel ranks that gather shards for each forward must run as many of them.
        self._may_keep_whole = section.num_micro_batches is None and data_group is None
        last = self.rank == self._rank_of[-1]
        self.trials = Trials(
            module,
            self.planner,
            self,
            section.whole_inputs,
            self._alike,
            data_group,
            last,
            self._device,
            keeps_whole=self._say_whole if self._may_keep_whole else None,
        )
        # What scripts do with the model's own object: call it, let it generate, call parts of it.
        self.planner.interception.route(self.forward)
        self.script_writes = script_writes.ScriptWrites(module, in_shards=data_group is not None)
        self._stages: list[Stage] = []
        self._schedules: dict[int, Any] = {}
        self._programs = Programs()
        self._compute: Callable[[int, int, tuple[Tensor, ...]], Any] | None = None
        self.version = 0
        """Grows with each change of the parameters."""
        self.converted = False
        """The script has called ``model.to(...)`` or the like since the last forward."""
        self._warned = self._said_whole = False

    @property
    def stages(self) -> Sequence[Stage]:
        """This rank's stages, first one first; none before the first forward has cut the model."""
        return tuple(self._stages)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of the pipeline."""
        return self._group

    # ---- forward ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model: deferred in training mode, at once otherwise. Collective over the pipeline."""
        if torch.is_grad_enabled() and self._module.training:
            return self.call(args, kwargs)
        return self.evaluate(args, kwargs)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output that the model will have: deferred tensors in the containers that its forward returns."""
        with self.script_writes.of_engine():
            return hooks.around(self._called, self._call, args, kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        arguments = (args, kwargs)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves(arguments)):
            raise UnsupportedError(
                "an input of a pipelined model requires a gradient, which only the process of the first stage would "
                "get",
                cure="Put what computes the input into the model's forward, or pass input.detach(), or use "
                "pipeline_parallel_size: 1.",
            )
        way = self._way(arguments)
        if schedules.wanted_parts(self._section, self.num_ranks) > 1:
            if self.trials.would_try(arguments):
                self._check_inputs(arguments)
            dims = self.trials.dims(arguments)
            size = size_along(arguments, dims)
            rows = Rows.of(size, schedules.parts_for(self._section, size, self.num_ranks))
        else:
            rows, dims = Rows.of(1, 1), ()
        return ModelCall(self, arguments, rows, way, self.version, dims, self.planner.trained).outputs()

    def _check_inputs(self, arguments: Arguments, more: Sequence[Any] = (), written: Sequence[str] = ()) -> None:
        """All ranks that compute a batch together were given the same. Collective over them.

        Args:
            arguments: of the model.
            more: what its loss is computed with.
            written: names of parameters that the script has written to.
        """
        told = [leaf for leaf in leaves(arguments) if isinstance(leaf, Tensor)]
        digests = [agreement.digest(one, self._device) for one in (told, more)]
        digests.append(torch.tensor(script_writes.digest(written), device=self._device))
        *others, writes = agreement.differing(digests, self._alike)
        if writes:
            raise script_writes.differ(type(self._module).__name__, written)
        wrong = [name for name, other in zip(_GIVEN, others, strict=True) if other]
        if wrong:
            raise agreement.differ(wrong)

    @torch.no_grad()
    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run forward over the stages; every rank gets the output. Collective over the pipeline."""
        with self.script_writes.of_engine():
            return hooks.around(self._called, self._evaluate, args, kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        way = self._way((args, kwargs))
        self._check_inputs((args, kwargs))

        def run(stage: int, values: Any) -> Any:
            begin()
            return self._run_stage(stage, (args, kwargs), way, values)

        with self._own_numbers(way) as begin:
            output = self._through((args, kwargs), way, run)
        return self._everywhere(output, way.output)

    def attempt(self, arguments: Arguments, way: Passage, adjusting: Adjusting | None) -> tuple[Any, str]:
        """Run one batch forward over all stages as a trial. Collective over the pipeline.

        Returns:
            The output, on the rank of the last stage, and what this rank's stages raised. The ranks after it get zeros.
        """
        problem = ""

        def run(stage: int, values: Any) -> Any:
            nonlocal problem
            try:
                return self._run_stage(stage, arguments, way, values, adjusting if self._is_last(stage) else None)
            except Exception as raised:  # noqa: BLE001 (a user's forward raises anything; it is reported)
                problem = problem or failed(raised)
                return way.output if self._is_last(stage) else self._zeros(way.crossings[stage].metas)

        return self._through(arguments, way, run), problem

    def _is_last(self, stage: int) -> bool:
        return stage == len(self._rank_of) - 1

    def _zeros(self, metas: Sequence[Meta]) -> tuple[Tensor, ...]:
        return tuple(meta.empty(self._device).zero_() for meta in metas)

    def _way(self, arguments: Arguments) -> Passage:
        if self.converted:
            self._check_types()
        if any(_is_cache(value) for value in (*arguments[0], *arguments[1].values())):
            raise UnsupportedError(
                "a pipelined model was given a cache of keys and values, whose layers are on different stages",
                cure="Pass use_cache=False, as in model.generate(..., use_cache=False).",
            )
        if any(isinstance(leaf, Deferred) and leaf.node.value is None for leaf in leaves(arguments)):
            raise UnsupportedError(
                "an output of a pipelined model, whose value is not known before backward, is an input of another call",
                cure="Put both models into one module and prepare that, or use pipeline_parallel_size: 1.",
            )
        hooks.check_global_hooks()
        self.planner.look()
        cut_before = self.planner.cut is not None
        way = self.planner.passage(arguments)
        if not cut_before:
            self._check_formats()
            self._divide()
        return way

    def _check_formats(self) -> None:
        """Refuse what ends the process in torch's kernel: ``GroupNorm`` by channels, whose input needs no gradient."""
        splits = self._section.schedule in {"zero_bubble", "zbv", "dualpipev"} and self._device.type == "cpu"
        if not splits or not any(isinstance(one, nn.GroupNorm) for one in self._module.modules()):
            return
        for name, one in self._module.named_parameters():
            if one.dim() == 4 and one.is_contiguous(memory_format=torch.channels_last) and not one.is_contiguous():
                raise UnsupportedError(
                    f"{name} of {type(self._module).__name__} is in the memory format channels_last, and the schedule "
                    f"{self._section.schedule} computes gradients of weights by themselves, where torch's GroupNorm on "
                    "the CPU ends the process",
                    cure="Write `schedule: 1f1b`, or leave the model in its contiguous format.",
                )

    def _check_types(self) -> None:
        self.converted = False
        self._check_formats()
        planned = dict(self.planner.skeleton.module.named_parameters())
        for name, parameter in self._module.named_parameters():
            if parameter.dtype != planned[name].dtype:
                raise UnsupportedError(
                    f"{name} was {planned[name].dtype} when the model was prepared and is {parameter.dtype} now",
                    cure="Convert the model before prepare, or use mixed_precision.",
                )

    def _divide(self) -> None:
        """Keep this rank's stages and free the others."""
        made = self.planner.cut
        assert made is not None, "the first passage cuts"
        self._on_cut(Share.of(self._module, made, self._rank_of.__getitem__, self.rank))
        self.script_writes.renew()
        self.planner.look(replaced=True)
        names = dict(self._module.named_parameters())
        for stage, rank in enumerate(self._rank_of):
            if rank != self.rank:
                continue
            held = {name: names[name] for name, stages in made.parameters.items() if stage in stages}
            module = StageModule(self._computing(stage), held, type(self._module).__name__)
            self._stages.append(Stage(module, stage, len(self._rank_of), self._device, self._group))

    def _computing(self, stage: int) -> Callable[[int, tuple[Tensor, ...]], Any]:
        def compute(index: int, received: tuple[Tensor, ...]) -> Any:
            assert self._compute is not None, "a schedule runs inside of train"
            return self._compute(stage, index, received)

        return compute

    def _run_stage(
        self,
        stage: int,
        arguments: Arguments,
        way: Passage,
        received: Sequence[Tensor],
        adjusting: Adjusting | None = None,
    ) -> Any:
        """One stage's output for one micro-batch: a tuple for the next stage, or the model's output."""
        run = StageRun(stage, way, received, adjusting.paused if adjusting is not None else nullcontext)
        with hooks.left_out(self._called):
            try:
                return self._computed(run, stage, arguments, adjusting)
            except RuntimeError:
                self._check_values()
                raise

    def _computed(self, run: StageRun, stage: int, arguments: Arguments, adjusting: Adjusting | None) -> Any:
        args, kwargs = arguments
        intercepted = self.planner.interception.run
        if stage < len(self._rank_of) - 1:
            # Past the engine's cast of outputs: what goes to the next stage stays in the dtype of the computation.
            with autocast(self._engine.policy, str(self._device)):
                return intercepted(run, lambda: call_plainly(self._model, *args, **kwargs))
        with adjusting if adjusting is not None else nullcontext():
            return self._engine.forward(
                lambda: intercepted(run, lambda: call_plainly(self._model, *args, **kwargs)), (), {}
            )

    def _check_values(self) -> None:
        for name, parameter in self._module.named_parameters():
            if parameter.is_meta and not isinstance(parameter, Elsewhere):
                raise UsageError(
                    f"{name}.data = ... was given values that are computed from a parameter of another pipeline stage, "
                    "which this rank does not have",
                    cure="Compute it from this parameter alone, or before accelerator.prepare.",
                )

    def _through(self, arguments: Arguments, way: Passage, run: Callable[[int, Any], Any] | None = None) -> Any:
        """Run one batch forward over all stages; on the rank of the last one its output. Collective."""
        run = run or (lambda stage, values: self._run_stage(stage, arguments, way, values))
        values: Any = ()
        for stage, rank in enumerate(self._rank_of):
            if rank != self.rank:
                continue
            if stage and self._rank_of[stage - 1] != rank:
                values = self._receive(way.crossings[stage - 1].metas, self._rank_of[stage - 1])
            values = run(stage, values)
            if stage < len(self._rank_of) - 1 and self._rank_of[stage + 1] != rank:
                self._send(values, self._rank_of[stage + 1])
        return values

    def _receive(self, metas: Sequence[Meta], rank: int) -> tuple[Tensor, ...]:
        values = tuple(meta.empty(self._device) for meta in metas)
        for value in values:
            dist.recv(value, group=self._group, group_src=rank)
        return values

    def _send(self, values: Sequence[Tensor], rank: int) -> None:
        for value in values:
            dist.send(value.detach().contiguous(), group=self._group, group_dst=rank)

    def _everywhere(self, output: Any, like: Any) -> Any:
        """The last stage's output on every rank. Collective over the pipeline.

        Args:
            output: on the rank of the last stage.
            like: the same without values.
        """
        source = self._rank_of[-1]
        mine = output if self.rank == source else like
        told: list[Any] = [None]
        if self.rank == source:
            told = [[Meta.of(one) if isinstance(one, Tensor) else None for one in leaves(output)]]
            if any(is_absent(one) for one in leaves(output)):
                told = [None]
        dist.broadcast_object_list(told, group=self._group, group_src=source)
        if told[0] is None:
            raise UsageError(
                "an output of the pipelined model is a tensor of an earlier stage, which the module that computes it "
                "does not return",
                cure="Return it from that module's forward, so that it is sent to the last stage.",
            )
        values = []
        for leaf, meta in zip(leaves(mine), told[0], strict=True):
            if meta is None:
                values.append(leaf)
                continue
            value = leaf.detach().contiguous() if self.rank == source else meta.empty(self._device)
            dist.broadcast(value, group=self._group, group_src=source)
            values.append(value)
        return rebuilt(mine, values)

    # ---- training ---------------------------------------------------------------------------------------------------

    def train(self, call: ModelCall[Arguments, Passage], loss: Node, scaled: Callable[[Tensor], Tensor]) -> None:
        """Run the schedule: forward and backward of ``scaled(loss)``; then values are known. Collective.

        Args:
            call: the call of the loss.
            loss: recorded, 0-d.
            scaled: what backward starts from, given a loss whose mean over micro-batches is the batch's.
        """
        if self.planner.trained_now() != call.trained:
            raise UsageError(
                "parameters of a pipelined model were frozen or unfrozen between its forward and "
                "accelerator.backward(loss), where the forward runs",
                cure="Call requires_grad_ before the forward.",
            )
        if self.planner.hooks.changed():
            raise hooks.changed_between()
        # Another forward may have seen another state: a reference without the adapter that is trained.
        self.planner.look()
        used = [leaf for node in replay.ordered([loss]) for leaf in leaves((node.args, node.kwargs))]
        drawn = [torch.tensor(host_digest())] if call.way.draws.on_host else []
        given = [*(leaf for leaf in used if isinstance(leaf, Tensor)), *drawn]
        self._check_inputs(call.arguments, given, self.script_writes.taken())
        with self.script_writes.of_engine():
            self._train(call, loss, scaled)

    def _train(self, call: ModelCall[Arguments, Passage], loss: Node, scaled: Callable[[Tensor], Tensor]) -> None:
        work = self._prepared(call, loss, call.living())
        parts = len(call.rows)
        if parts not in self._schedules:
            self._schedules[parts] = schedules.make(self._section, self._stages, parts, lambda output, _: output)
        for stage in self._stages:
            before, after = stage.stage_index - 1, stage.stage_index
            stage.has_backward = True
            stage.clear_runtime_states()
            stage.expect(
                [way.crossings[before].metas if before >= 0 else () for way in work.ways],
                [way.crossings[after].metas if after < len(way.crossings) else () for way in work.ways],
            )
        last = len(self._rank_of) - 1

        def compute(stage: int, index: int, received: tuple[Tensor, ...]) -> Any:
            adjusting = work.adjusting() if stage == last else None
            counted.begin()
            begin()
            output = self._run_stage(stage, work.batches[index], work.ways[index], received, adjusting)
            return scaled(work.finish(index, output) / parts) if stage == last else output

        with (
            once(self._module, self.trials.counted, keep=True) as counted,
            self._own_numbers(call.way) as begin,
            self._computing_by(compute),
        ):
            schedules.run(self._schedules[parts], parts)
        for stage in self._stages:
            stage.check_written()
            stage.clear_runtime_states()
        work.share(self._rank_of[last], self._group, self._device)
        read(loss)
        call.finish()

    def read(self, call: ModelCall[Arguments, Passage], node: Node) -> Any:
        """Compute a node's value by another forward of the full batch. Collective over the pipeline."""
        if call.version != self.version:
            raise UsageError(
                "a value of a pipelined model's output is read after the optimizer stepped, and backward did not "
                "compute it",
                cure="Read it before optimizer.step(); numbers that exist when backward is called stay readable.",
            )
        if not self._warned:
            self._warned = True
            logger.warning(
                "The output of a pipelined model is read before accelerator.backward(loss) computed it: the model runs "
                "once more, forward only. Read losses after backward, when their values are there."
            )
        nodes = replay.ordered([node])
        whole = Rows.of(call.rows.size, 1)
        results: dict[int, Any] = {}
        with (
            self.script_writes.of_engine(),
            without_gradients(),
            self.planner.without_randomness(),
            once(self._module, self.trials.counted) as counted,
        ):
            counted.begin()
            output = self._through(call.arguments, call.way)
            if self.rank == self._rank_of[-1]:
                outputs = dict(enumerate(leaves(output)))
                check(nodes, outputs, call.way)
                results = replay.run(uncut(nodes), nodes, whole, 0, outputs)
            return self._everywhere(results.get(id(node)), node.absent)

    def example(self, call: ModelCall[Arguments, Passage], loss: Node) -> tuple[Tensor, int] | None:
        """A loss on random outputs, see :meth:`~drivetrain_megatron.pipeline.programs.Programs.example`.

        Not collective, and the same on every rank.
        """
        self.planner.look()

        def example() -> tuple[Tensor, int] | None:
            way = call.way
            if len(call.rows) > 1:
                way = self.planner.passage(cut(call.arguments, call.rows, call.dims)[0])
            return self._programs.example(loss, call.rows, dict(enumerate(leaves(way.output))))

        return self._in_parts_or_whole(call, example)

    def _in_parts_or_whole(self, call: ModelCall[Arguments, Passage], compute: Callable[[], ResultT]) -> ResultT:
        """Compute with a call's batch in parts; if its loss does not allow that and nobody asked for parts, in one."""
        try:
            return compute()
        except WholeBatchError as problem:
            if not self._may_keep_whole:
                raise
            self._say_whole(problem.what)
            call.rows, call.dims = Rows.of(1, 1), ()
            return compute()

    def _say_whole(self, why: str) -> None:
        if not self._said_whole:
            self._said_whole = True
            logger.warning(
                "%s. So each batch of %s stays in one piece, and its pipeline stages wait for each other. "
                "megatron.num_micro_batches: 1 says that this is meant.",
                why[:1].upper() + why[1:],
                type(self._module).__name__,
            )

    def _prepared(
        self, call: ModelCall[Arguments, Passage], loss: Node, others: Sequence[Node]
    ) -> Work[Arguments, Passage]:
        return self._in_parts_or_whole(call, lambda: self._work_of(call, loss, others))

    def _work_of(
        self, call: ModelCall[Arguments, Passage], loss: Node, others: Sequence[Node]
    ) -> Work[Arguments, Passage]:
        rows = call.rows
        batches = cut(call.arguments, rows, call.dims) if len(rows) > 1 else [call.arguments]
        ways = [self.planner.passage(arguments) for arguments in batches]
        outputs = dict(enumerate(leaves(ways[0].output)))
        recordings = self._programs.recordings(loss, others, rows, outputs)
        counts: list[Reduction | Tensor] = []
        if len(rows) > 1 and self.rank == self._rank_of[-1]:
            counts = self.planner.counts(call.arguments, call.way)
        return Work(batches, ways, rows, recordings, counts)

    def _own_numbers(self, way: Passage) -> AbstractContextManager[Callable[[], None]]:
        """Each stage draws random numbers of its own in here; see :mod:`~drivetrain_megatron.pipeline.randomness`."""
        stream = self.rank + self.num_ranks * numbers_coordinate(self._replica)
        return own_numbers(way.draws, stream, self._rank_of[-1], self._group, self._device)

    @contextmanager
    def _computing_by(self, compute: Callable[[int, int, tuple[Tensor, ...]], Any]) -> Iterator[None]:
        self._compute = compute
        try:
            yield
        except RuntimeError as problem:
            # Torch's stages wrap what a forward raises; the user's own mistake is what must be seen.
            if isinstance(problem.__cause__, DrivetrainError):
                raise problem.__cause__ from None
            raise
        finally:
            self._compute = None

    def changed(self) -> None:
        """Parameters have other values now: outputs of calls before are not to be had any more."""
        self.version += 1

    def release(self) -> None:
        """Give the module its classes back. May be called twice."""
        self._schedules.clear()
        self._stages.clear()
        self.planner.release()


def _is_cache(value: Any) -> bool:
    """Whether an argument of a model keeps the keys and values of earlier words for its layers.

    Told by the two methods that every layer calls on such an object, since its keyword changes between releases of
    Transformers (``past_key_values``, then ``cache``).
    """
    return all(callable(getattr(type(value), method, None)) for method in ("update", "get_seq_length"))
