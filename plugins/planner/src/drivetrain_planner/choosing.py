"""Asks the backends for their layouts, drops those that do not fit, and ranks the others by the time of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from drivetrain.api import Mesh, UsageError
from drivetrain.api.programs import get_registry
from drivetrain_planner.estimates import Estimate, PlanRequest, Traffic
from drivetrain_planner.machines import Machine

GROUP = "drivetrain.estimates"
"""Entry points named after backends: each a function from a :class:`PlanRequest` to a sequence of :class:`Estimate`."""

SHARE = 0.8
"""Fraction of a device's memory that a plan may use. Of 454 public runs none that was estimated below it ran out of
memory (Fujii et al., arXiv 2411.06465); the rest is for fragmentation and for what is not counted."""

CUTTING = tuple(axis for axis in Mesh().sizes if Mesh({axis: 2}).dp_size == 1)
"""Mesh axes along which a model or its samples are cut, so that these ranks read the same samples."""

_TIE = 0.03
"""Fraction by which a layout may take longer than the fastest and count as fast; then the simpler one wins."""

BESIDE = 0.3
"""Fraction of the shorter of computation and communication that overlap does not hide. On a CPU all of it: the cores
that compute also add up what they exchange."""


@dataclass(frozen=True)
class Candidate:
    """One layout on one machine.

    Args:
        estimate: the backend's.
        bytes: of a rank at its most, context included.
        seconds: of an optimizer step, by part.
        verdict: why it is not taken; empty for one that fits.
        unused: bytes that an accelerator's caching allocator may keep beside these, see :attr:`Trace.unused`; they come
            out of the fifth of a device that no plan uses.
    """

    estimate: Estimate
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    verdict: str = ""
    unused: int = 0

    @property
    def time(self) -> float:
        """Seconds of an optimizer step."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Choice:
    """Result of the choice.

    Args:
        fitting: the fastest first.
        rejected: the others, in the order of the backends' answers.
        complaints: of backends that failed.
        machine: for which.
        request: what was planned.
    """

    fitting: Sequence[Candidate]
    rejected: Sequence[Candidate]
    complaints: Sequence[str]
    machine: Machine
    request: PlanRequest

    @property
    def best(self) -> Candidate:
        """The layout to take. Raises :class:`UsageError` when none fits."""
        if self.fitting:
            return self.fitting[0]
        what = f"no layout fits {self.request.world_size} x {self.machine.name} ({gib(self.machine.memory)} each)"
        large = [each for each in self.rejected if not each.estimate.refused]
        if large:
            least = min(large, key=lambda each: each.bytes)
            raise UsageError(
                f"{what}; the one that holds least, {least.estimate.title}: {least.verdict}",
                cure="Take more or larger devices, a smaller micro-batch, or bf16.",
            )
        told = "; ".join(f"{each.estimate.title}: {each.verdict}" for each in self.rejected)
        raise UsageError(f"{what}: {told or 'no installed backend offers one'}", cure=self._cure_of_refusals())

    def _cure_of_refusals(self) -> str:
        every = self.request.micro_batch * self.request.world_size
        if self.request.global_batch % every:
            return f"Take a global batch that is a multiple of {every}, which every layout divides."
        return "Change what the reasons name, or ask for another number of processes."


def choose(request: PlanRequest, machine: Machine) -> Choice:
    """Ask every backend and rank its layouts. Raises :class:`UsageError` when the model cannot be traced."""
    request.trace((), (), None)
    estimates, complaints = ask(request)
    candidates = [weigh(each, request, machine) for each in estimates]
    if any(not each.verdict and not each.estimate.last_resort for each in candidates):
        candidates = [each for each in candidates if not each.estimate.last_resort]
    candidates, failed = _with_variants(candidates, request, machine)
    complaints += failed
    fitting = [each for each in candidates if not each.verdict]
    # What host memory is used for takes longest to move and to update, and is known worst.
    fitting.sort(key=lambda each: (bool(each.estimate.host), each.time, each.estimate.rank))
    alike = [each for each in fitting if _as_fast(each, fitting[0])]
    fitting[: len(alike)] = sorted(alike, key=lambda each: (each.estimate.rank, each.time))
    return Choice(fitting, [each for each in candidates if each.verdict], complaints, machine, request)


def _with_variants(
    candidates: Sequence[Candidate], request: PlanRequest, machine: Machine
) -> tuple[list[Candidate], list[str]]:
    """Let the better of a layout's variants take its place, where one could be chosen.

    Returns:
        The candidates, in their order; a sentence for each whose variants could not be estimated.
    """
    found, complaints = list(candidates), []
    memory = round(SHARE * machine.memory) - machine.context

    def without_waiting(place: int) -> float:
        return found[place].time - found[place].seconds.get("waiting", 0.0)

    asked = [place for place, each in enumerate(found) if each.estimate.variants is not None]
    for place in sorted(asked, key=without_waiting):
        own, variants = found[place], found[place].estimate.variants
        assert variants is not None
        fitting = [each.time for each in found if not each.verdict and not each.estimate.host]
        if fitting and without_waiting(place) >= min(fitting):
            continue
        try:
            others = (weigh(each, request, machine) for each in variants(machine, memory))
            found[place] = next((each for each in others if _is_better(each, own)), own)
        except Exception as error:  # noqa: BLE001 - said; the layout is weighed as it was estimated first
            complaints.append(f"variants of {own.estimate.title} could not be estimated: {error!r}")
    return found, complaints


def _is_better(one: Candidate, other: Candidate) -> bool:
    """Whether a variant fits where the other does not, or both fit and it is faster by more than a tie."""
    if one.verdict:
        return False
    return bool(other.verdict) or one.time * (1 + _TIE) < other.time


def offered_axes() -> frozenset[str]:
    """Mesh axes that some installed backend has."""
    registry = get_registry()
    return frozenset[str]().union(*(registry.info(name).capabilities.mesh_axes for name in registry.names()))


def check_mesh(mesh: Mapping[str, int]) -> None:
    """Refuse to plan beside axes that a configuration names, since the layouts bring their own.

    Args:
        mesh: their sizes.

    Raises:
        UsageError: an axis along which a model is cut is larger than 1.
    """
    named = {axis: size for axis, size in mesh.items() if axis in CUTTING and size > 1}
    if absent := sorted(set(named) - offered_axes()):
        raise UsageError(
            f"no installed backend has the mesh axis {', '.join(absent)}, so that no layout with it can be planned",
            cure=f"Remove {', '.join(absent)} from mesh:.",
        )
    if named:
        told = ", ".join(f"{axis}: {size}" for axis, size in named.items())
        raise UsageError(
            f"the configuration names mesh: {{{told}}}, and the planner chooses the sizes of these axes",
            cure="Remove them from mesh:, or keep to them by the backend's section, such as "
            "megatron: {tensor_parallel_size: 2}.",
        )


def ask(request: PlanRequest, backend: str | None = None) -> tuple[list[Estimate], list[str]]:
    """Return the estimates of the installed backends, ordered by name, and a sentence for each that failed.

    A function is called in one process, with torch imported and no process group. A layout that cannot be is given
    with ``refused``, so that it can be told why.

    Args:
        request: what is planned.
        backend: the name of the only one to ask; ``None`` = all.
    """
    found: list[Estimate] = []
    complaints: list[str] = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        if backend not in (None, point.name):
            continue
        try:
            found += point.load()(request)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - said; the plan is made without this backend
            owner = point.value if point.dist is None else f"{point.dist.name} {point.dist.version}"
            complaints.append(f"{owner} could not estimate its layouts: {type(error).__name__}: {error}")
    return found, complaints


def weigh(estimate: Estimate, request: PlanRequest, machine: Machine) -> Candidate:
    """Bytes and seconds of one layout, and whether it fits."""
    if estimate.refused:
        return Candidate(estimate, verdict=estimate.refused)
    held = estimate.peak + machine.context
    allowed = round(SHARE * machine.memory)
    verdict = ""
    if held > allowed:
        part, most = max(estimate.memory.items(), key=lambda each: each[1])
        verdict = f"{gib(held)} > {gib(allowed)}, which is {SHARE:.0%} of {gib(machine.memory)}; {gib(most)} are {part}"
    unused = 0 if estimate.trace is None or machine.device_type == "cpu" else estimate.trace.unused
    # A full allocator gives back what it keeps before it fails.
    unused = max(0, min(unused, machine.memory - held))
    return Candidate(estimate, held, seconds(estimate, request, machine), verdict, unused)


def seconds(estimate: Estimate, request: PlanRequest, machine: Machine) -> dict[str, float]:
    """Seconds of an optimizer step by part.

    Returns:
        ``computation``; ``communication`` that is not hidden; ``optimizer``, on the device; ``copies`` of the engine on
        the device; where a rank waits for others, ``waiting``; where host memory is used, ``host copies`` that are not
        hidden, and ``host optimizer``.
    """
    trace = estimate.trace
    assert trace is not None, estimate.title
    compute = estimate.accumulation * (machine.work(trace.forward) + machine.work(trace.backward))
    copies = [each for each in estimate.traffic if each.operation == "host_copy"]
    messages = [each for each in estimate.traffic if each.operation != "host_copy"]
    with_messages, exposed = _beside(compute, messages, machine)
    found = {
        "computation": compute,
        "communication": exposed,
        "optimizer": estimate.stepped * request.optimizer.moved / machine.bandwidth,
    }
    if estimate.copied:
        found["copies"] = estimate.copied / machine.bandwidth
    if estimate.idle:
        found["waiting"] = compute * estimate.idle / (1 - estimate.idle)
    if copies:
        found["host copies"] = _beside(with_messages, copies, machine)[1]
    if estimate.stepped_in_host:
        # Reads parameters, gradients and state, writes parameters and state. A machine's processes share its host.
        moved = 3 + 2 * request.optimizer.per_element
        found["host optimizer"] = estimate.stepped_in_host * moved * request.ranks_per_node / machine.host_bandwidth
    return found


def _beside(busy: float, traffic: Sequence[Traffic], machine: Machine) -> tuple[float, float]:
    """Seconds of what runs together, and those that traffic adds to what is busy."""
    beside = sum(machine.traffic(each) for each in traffic if each.overlaps)
    alone = sum(machine.traffic(each) for each in traffic if not each.overlaps)
    shown = 1.0 if machine.device_type == "cpu" else BESIDE
    together = max(busy, beside) + shown * min(busy, beside)
    return together, alone + together - busy


def _as_fast(one: Candidate, fastest: Candidate) -> bool:
    """Whether the seconds of a layout are those of the fastest, and both use host memory or neither does."""
    return bool(one.estimate.host) == bool(fastest.estimate.host) and one.time <= (1 + _TIE) * fastest.time


def gib(size: int) -> str:
    """Bytes for people."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:.1f} {unit}"
    return f"{size} B"


def settings_of(candidate: Candidate, request: PlanRequest) -> dict[str, Any]:
    """Keys and values of a configuration file that trains with a layout; the user's own sections are kept."""
    found: dict[str, Any] = {"num_processes": request.world_size, "mixed_precision": request.precision.name}
    if request.device_type == "cpu":
        found["use_cpu"] = True
    for key, value in candidate.estimate.settings.items():
        own = request.sections.get(key)
        found[key] = {**own, **value} if own is not None and isinstance(value, dict) else value
    return found
