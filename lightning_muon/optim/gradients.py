"""What all ranks must know of the gradients before a step: who has one, and whether all are finite."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_muon.comm.agreement import Message, StepAgreement, are_equal, both_signs, maxima_over
from lightning_muon.comm.collectives import start_all_reduce_sum, start_reading
from lightning_muon.comm.groups import AxisGroup, axis_group
from lightning_muon.config import join_names
from lightning_muon.grad_sync.clipping import local_norms
from lightning_muon.optim.matrix_step import AgreedGradients
from lightning_muon.optim.parameters import Gradients, MeshMembers, hyperparameter_digest
from lightning_muon.optim.step_plan import StepPlan
from lightning_muon.params.layout import Layout, local_tensor, replicated_axes


@dataclass(eq=False)
class GradientsAreNotFinite(Exception):  # noqa: N818 - no error yet: the step is skipped
    """Some rank has a NaN or an Inf; raised on all ranks, with nothing changed."""

    names: tuple[str, ...]


class GradientsHaveChanged(Exception):  # noqa: N818 - no error: the step is run once more
    """Some rank has gained or lost gradients since the ranks agreed on them; raised on all ranks."""


@dataclass(kw_only=True)
class _Flags(Message):
    """What a rank knows of the parameters of one mesh; the maxima over the ranks are what any of them knows."""

    # One for each parameter.
    has: list[int]
    lacks: list[int]
    is_unusable: list[int]
    is_unreduced: list[int]
    is_nonfinite: list[int]
    # One for the optimizer.
    is_stale: int
    must_stop: int
    backward_has_failed: int
    may_lack_gradients: int
    hyperparameters: list[int]  # A digest in both signs.


@dataclass
class _Findings:
    """What was found on the meshes so far; the next, larger mesh is told."""

    is_stale: bool
    backward_has_failed: bool = False
    may_lack_gradients: bool = True
    must_stop: bool = False
    nonfinite: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()
    partly: tuple[Tensor, ...] = ()
    unreduced: tuple[Tensor, ...] = ()

    def add(self, flags: _Flags, unused: Collection[Tensor], members: MeshMembers, plan: StepPlan) -> None:
        """Add what any rank of a mesh knows, and the parameters that none of them has used; local."""
        tensors, names = members.tensors, [plan.names[tensor] for tensor in members.tensors]
        partly = [
            has and lacks and tensor not in unused
            for tensor, has, lacks in zip(tensors, flags.has, flags.lacks, strict=True)
        ]
        # A partial sum is reduced by all ranks, or by none.
        partial_sums = zip(flags.is_unusable, flags.is_unreduced, partly, strict=True)
        unusable = [bad or (is_sum and some) for bad, is_sum, some in partial_sums]
        self.unusable += tuple(compress(names, unusable))
        self.nonfinite += tuple(compress(names, flags.is_nonfinite))
        self.partly += tuple(compress(tensors, partly))
        self.unreduced += tuple(compress(tensors, flags.is_unreduced))
        # If hyper-parameters differ between ranks, making a new plan raises and names the difference.
        self.is_stale |= bool(flags.is_stale) or not are_equal(flags.hyperparameters)
        self.backward_has_failed = bool(flags.backward_has_failed)
        self.may_lack_gradients = bool(flags.may_lack_gradients)
        self.must_stop |= bool(flags.must_stop) or any(unusable) or any(flags.is_nonfinite)


class LocalGradients(MutableMapping[Tensor, Tensor]):
    """Local gradient of each parameter; those that the layout has, maybe later, are read when they are first used."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._found: dict[Tensor, Tensor | None] = {}

    def add_unread(self, tensors: Iterable[Tensor]) -> None:
        """Parameters whose gradients the layout has when they are used."""
        self._found.update(dict.fromkeys(tensors))

    @override
    def __getitem__(self, tensor: Tensor) -> Tensor:
        found = self._found[tensor]
        if found is None:
            gradient = self._layout.gradient(tensor)
            assert gradient is not None
            found = self._found[tensor] = gradient.to(tensor.dtype)
        return found

    @override
    def __setitem__(self, tensor: Tensor, gradient: Tensor) -> None:
        self._found[tensor] = gradient

    @override
    def __delitem__(self, tensor: Tensor) -> None:
        del self._found[tensor]

    @override
    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._found)

    @override
    def __len__(self) -> int:
        return len(self._found)

    @override
    def __contains__(self, tensor: object) -> bool:
        return tensor in self._found


def agree_on_gradients(
    plan: StepPlan,
    step: StepAgreement | None = None,
    *,
    error_if_nonfinite: bool,
    is_stale: bool,
    nonfinite_elsewhere: Tensor | None = None,
    backward_has_failed: bool = False,
    may_lack_gradients: bool = True,
) -> AgreedGradients | None:
    """Find the parameters with a gradient on any rank of their mesh; zeros stand in where only this rank has none.

    Returns ``None`` on all ranks if any needs a new plan (``is_stale``). Where the ranks have agreed before
    (``Layout.agreed``) they send no message: later changes are found out together with NaN and Inf.
    ``nonfinite_elsewhere``, a bool on the device, says that another stage of a pipeline has one. Collective over every
    mesh of the parameters, the smallest first.
    """
    layout, found = plan.layout, LocalGradients(plan.layout)
    numbers: dict[Tensor, float] = {}
    findings = _Findings(is_stale, backward_has_failed, may_lack_gradients)
    if step is not None and not any(step.is_over(members.host) for members in plan.meshes):
        step.reduce(())
    expected, layout.agreed = layout.agreed, None
    if error_if_nonfinite and expected and len(plan.meshes) == 1:
        return _with_known_gradients(plan, expected, findings, nonfinite_elsewhere)
    host_reads = _host_reads_at_once(plan.device) and not layout.arrives_late
    nonfinite_elsewhere = nonfinite_elsewhere if error_if_nonfinite else None
    findings.must_stop = host_reads and nonfinite_elsewhere is not None and bool(nonfinite_elsewhere)
    for members in plan.meshes:
        own = _local_flags(members, plan, found, findings, checks=error_if_nonfinite and host_reads)
        flags, unused = _of_all_ranks(own, members, step)
        for tensor in unused:
            if tensor in found:
                del found[tensor]
        findings.add(flags, unused, members, plan)
    deferred_check = None
    if not host_reads and not findings.must_stop and not findings.is_stale:
        deferred_check = _DeferredCheck(plan, found, numbers, error_if_nonfinite, nonfinite_elsewhere).begun()
    _raise_if_needed(findings)
    if findings.is_stale:
        return None
    _raise_if_lost(findings)
    for tensor in findings.unreduced:
        found[tensor] = _reduced(tensor)
    for tensor in findings.partly:
        _fill_in(layout, tensor, found)
    return AgreedGradients(gradients=found, deferred_check=deferred_check, numbers=numbers)


def _with_known_gradients(
    plan: StepPlan, expected: Collection[Tensor], findings: _Findings, nonfinite_elsewhere: Tensor | None
) -> AgreedGradients:
    """The ``expected`` gradients; a deferred check finds out whether some rank has others by now."""
    layout, found, numbers = plan.layout, LocalGradients(plan.layout), dict[Tensor, float]()
    has_changed = findings.is_stale or findings.backward_has_failed
    for tensor in plan.meshes[0].tensors:
        has = tensor.requires_grad and layout.has_gradient(tensor)
        is_wrong = has and (_is_unusable(tensor.grad) or _is_unreduced(tensor))
        is_expected = tensor in expected
        has_changed = has_changed or is_wrong or has is not is_expected
        if is_expected and has and not is_wrong:
            found.add_unread([tensor])
        elif is_expected:
            found[tensor] = torch.zeros_like(layout.local(tensor))
    check = _DeferredCheck(plan, found, numbers, True, nonfinite_elsewhere, has_changed=has_changed)
    return AgreedGradients(
        gradients=found, deferred_check=check.begun(), numbers=numbers, is_given_up=findings.is_stale
    )


def _host_reads_at_once(device: torch.device) -> bool:
    """Whether the host can read tensors of this device without waiting for it."""
    return device.type == "cpu"


def _local_flags(
    members: MeshMembers, plan: StepPlan, found: LocalGradients, findings: _Findings, *, checks: bool
) -> _Flags:
    """The flags of this rank; also adds the gradients that it has to ``found``. Local."""
    tensors = members.tensors
    has = [tensor.requires_grad and plan.layout.has_gradient(tensor) for tensor in tensors]
    present = list(compress(tensors, has))
    unusable = {tensor for tensor in present if _is_unusable(tensor.grad)}
    found.add_unread(tensor for tensor in present if tensor not in unusable)
    nonfinite: list[int] = [False] * len(tensors)
    if checks:
        (nonfinite,) = start_reading([_nonfinite(tensors, found, plan.device)])()
    return _Flags(
        has=[*has],
        lacks=[not each for each in has],
        is_unusable=[tensor in unusable for tensor in tensors],
        is_unreduced=[each and _is_unreduced(tensor) for tensor, each in zip(tensors, has, strict=True)],
        is_nonfinite=nonfinite,
        is_stale=findings.is_stale,
        must_stop=findings.must_stop,
        backward_has_failed=findings.backward_has_failed,
        may_lack_gradients=findings.may_lack_gradients or any(has),
        hyperparameters=both_signs([hyperparameter_digest(plan.groups_of[members])]),
    )


def _of_all_ranks(own: _Flags, members: MeshMembers, step: StepAgreement | None) -> tuple[_Flags, Collection[Tensor]]:
    """Maxima of the flags over the ranks of a mesh, and parameters that no rank uses, if ``step`` shares its message.

    Collective over the mesh.
    """
    if step is not None and step.is_over(members.host):
        maxima, unused = step.reduce(own.pack())
        return own.unpack(maxima), unused
    return own.unpack(maxima_over(members.host, own.pack())), ()


def _nonfinite(tensors: Sequence[Tensor], found: Gradients, device: torch.device) -> Tensor:
    """Whether each gradient of the calling rank has a NaN or an Inf, or a norm that overflows; bools on the device."""
    filled = [tensor for tensor in tensors if tensor in found and found[tensor].numel()]
    norms = dict(zip(filled, local_norms([found[tensor] for tensor in filled], is_exact=False), strict=True))
    fine = torch.zeros((), device=device)
    # All at once: one operation per norm would take a quarter of a step with many small parameters.
    return torch.stack([norms.get(tensor, fine) for tensor in tensors]).isfinite().logical_not()


@dataclass(eq=False)
class _DeferredCheck:
    """Checks what the host does not know yet of the gradients.

    :meth:`start` adds up the flags of all ranks, where possible on the device; :meth:`conclude` waits, and raises.
    """

    plan: StepPlan
    found: Gradients
    numbers: dict[Tensor, float]  # Gets the values of hyper-parameters that are on a device.
    checks: bool  # Whether gradients must be finite.
    nonfinite_elsewhere: Tensor | None
    has_changed: bool = False  # Whether this rank knows that the gradients are not those that were agreed upon.
    # For each mesh: how many ranks have found a problem with each parameter, and with the mesh.
    _counts: list[Tensor] = field(default_factory=list[Tensor])
    _work: dist.Work | None = None
    _read: Callable[[], list[list[Any]]] | None = None

    def __post_init__(self) -> None:
        groups = {id(parameter.group): parameter.group for parameter in self.plan.parameters}
        options = [value for group in groups.values() for value in group.values()]
        self._unknown = [value for value in options if isinstance(value, Tensor) and value.device.type != "cpu"]

    def begun(self) -> Callable[[], None] | None:
        """Return what :class:`AgreedGradients` waits for; ``None``, on all ranks, if there is nothing to check.

        Collective over every mesh of the parameters, now or, where gradients are on their way, when the result is
        called.
        """
        if not (self.checks or self._unknown):
            return None
        if not self.plan.layout.arrives_late:
            self.start()
        return self.conclude

    def start(self) -> None:
        """Count over the ranks. Collective over every mesh of the parameters."""
        stop = torch.zeros(1, dtype=torch.int32, device=self.plan.device)
        changed = torch.ones_like(stop) if self.has_changed else stop
        if self.nonfinite_elsewhere is not None:
            stop = self.nonfinite_elsewhere.to(stop).reshape(1)
        for number, members in enumerate(self.plan.meshes, start=1):
            broken = _nonfinite(members.tensors, self.found if self.checks else {}, self.plan.device)
            flags = torch.cat([broken.int(), changed, stop])
            is_on_host = flags.device.type == "cpu"
            axes = members.host if is_on_host else members.axes
            work = None if axes.group is None else start_all_reduce_sum(flags, axes)
            self._counts.append(flags)
            if work is not None and is_on_host and number == len(self.plan.meshes):
                self._work = work  # The host waits for the last one later.
                return
            if work is not None:
                work.wait()
            stop = torch.cat([flags[:-2], flags[-1:]]).any().int().reshape(1)
        self._read = start_reading([*self._counts, *self._unknown])

    def conclude(self) -> None:
        """Fill in ``numbers``, and raise for what any rank has found. Collective if it was not started before."""
        if not self._counts:
            self.start()
        if self._work is not None:
            self._work.wait()
        read = self._read or start_reading([*self._counts, *self._unknown])
        values = read()
        counts, numbers = values[: len(self._counts)], values[len(self._counts) :]
        self.numbers.update((tensor, value) for tensor, (value,) in zip(self._unknown, numbers, strict=True))
        findings = _Findings(is_stale=False)
        for members, (*infinite, has_changed, must_stop) in zip(self.plan.meshes, counts, strict=True):
            findings.nonfinite += tuple(compress((self.plan.names[tensor] for tensor in members.tensors), infinite))
            findings.must_stop |= any(infinite) or must_stop > 0
            if has_changed:
                raise GradientsHaveChanged
        _raise_if_needed(findings)


def _is_unusable(grad: Tensor | None) -> bool:
    """Whether a gradient is of a kind that no step takes."""
    return grad is not None and (grad.is_complex() or grad.is_sparse)


def _is_unreduced(tensor: Tensor) -> bool:
    """Whether the gradient has other placements than its parameter (a partial sum): all ranks must reduce it."""
    grad = tensor.grad
    return isinstance(grad, DTensor) and isinstance(tensor, DTensor) and grad.placements != tensor.placements


def _replicas(layout: Layout, tensor: Tensor) -> AxisGroup | None:
    """The ranks with the same part of a parameter, if several; collective the first time, every rank must call it."""
    mesh, placements = layout.mesh_and_placements(tensor)
    axes = () if mesh is None else replicated_axes(mesh, placements)
    return axis_group(mesh, axes) if mesh is not None and axes else None


def _reduced(tensor: Tensor) -> Tensor:
    """The local gradient, reduced where the program has left a partial sum, as torch's own optimizers do.

    Collective over the mesh of ``tensor``; all of its ranks have such a gradient.
    """
    assert isinstance(tensor.grad, DTensor) and isinstance(tensor, DTensor)
    return local_tensor(tensor.grad.redistribute(placements=tensor.placements)).to(tensor.dtype)


def _fill_in(layout: Layout, tensor: Tensor, found: Gradients) -> None:
    """Put zeros for a missing gradient; then average over replicas. Collective over these."""
    if tensor not in found:
        found[tensor] = torch.zeros_like(layout.local(tensor))
    replicas = _replicas(layout, tensor)
    if replicas is not None:
        found[tensor] = found[tensor].clone()
        start_all_reduce_sum(found[tensor], replicas).wait()
        found[tensor].div_(replicas.size)


def _raise_if_needed(findings: _Findings) -> None:
    if findings.unusable:
        raise TypeError(
            f"the gradient of {join_names(findings.unusable)} is sparse or complex, or a partial sum that only some "
            "ranks have; ParallelMuon takes dense real ones, and partial sums only from all ranks. For an embedding, "
            "set sparse=False"
        )
    if findings.must_stop:
        raise GradientsAreNotFinite(findings.nonfinite or ("a parameter of another mesh or stage, or in the loss",))


def _raise_if_lost(findings: _Findings) -> None:
    if findings.backward_has_failed:
        raise RuntimeError(
            "a backward pass has raised, and the program went on: FSDP2 is still in the middle of that pass and has "
            "not reduced all gradients since, so that some parameters would never be updated again. Call "
            "model.reset_iter_state() on every rank where the exception is caught (torch 2.13), then "
            "optimizer.zero_grad(); ParallelMuonStrategy and lightning_muon's Fabric and Accelerate do it themselves"
        )
    if not findings.may_lack_gradients:
        raise RuntimeError(
            "no parameter of the optimizer has a gradient on any rank, and no backward pass has reached one since the "
            "last step, so that the step would do nothing. Call loss.backward() before, and leave out the step of a "
            "batch whose backward pass has raised; with FSDP2 call model.reset_iter_state() after such an exception. "
            "A closure that returns None says that there is no loss"
        )
