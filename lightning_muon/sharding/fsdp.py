"""``sharding="fsdp"``: parameters, gradients and optimizer state sharded with FSDP2, and replicated between nodes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef
from typing_extensions import override

from lightning_muon.comm.agreement import maxima_over
from lightning_muon.comm.groups import AxisGroup, axis_group, host_group, shard_axis
from lightning_muon.compat.torch import (
    drop_unreduced_gradients,
    finish_reducing,
    forward_resharding,
    free_unsharded,
    has_unfinished_backward,
    has_unfinished_forward,
    is_in_backward,
    overwritten_weights,
    reset_fsdp,
    set_forward_resharding,
    start_reducing,
    unreduced_gradients,
)
from lightning_muon.params.uses import clean_name
from lightning_muon.sharding.base import ModeOptions, ShardingMode, attach_optimizers
from lightning_muon.sharding.fsdp_call_log import END, NO_DIGEST, FsdpCallLog
from lightning_muon.sharding.outputs import without_views
from lightning_muon.sharding.shard_model import (
    fsdp_modules,
    fsdp_roots,
    initialize_roots,
    own_places,
    set_gradient_divisor,
    shard_model,
)
from lightning_muon.sharding.weights import mesh_device

# Python's garbage collector does not look into hooks of tensors. They must not refer to the model, or it would never be
# freed, and neither would its process groups.


def _mark(used: list[bool], index: int, _: Tensor) -> None:
    used[index] = True


def _fill_with_zeros(wholes: Sequence[Tensor], zeros: dict[int, Tensor]) -> None:
    """Give whole weights without a gradient zeros as gradient, so that FSDP2 reduces them on all ranks."""
    for whole in wholes:
        if whole.requires_grad and whole.grad is None:
            zeros[id(whole)] = torch.zeros((), dtype=whole.dtype, device=whole.device).expand(whole.shape)
            whole.grad = zeros[id(whole)]


def _make_room(reference: TensorWeakRef, zeros: dict[int, Tensor], _: Tensor) -> None:
    """Remove the gradient of zeros, which takes no memory, before backward adds a gradient to it."""
    whole = reference()
    if whole is not None and zeros.pop(id(whole), None) is whole.grad:
        whole.grad = None


@torch.compiler.disable
def _replace_views(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    return without_views(output, (args, kwargs))


class Fsdp(ShardingMode):
    """FSDP2 over the last axis of the mesh, replicas over the other; parts that the user sharded are left as they are.

    FSDP2 reduces the gradients of a unit together, and hangs if a parameter is used on some ranks only. So missing
    gradients are filled with zeros, and one that no rank has computed is removed again: zeros would decay the weight.

    With ``decoupled_nodes`` the mesh is (replicate, shard), and FSDP2 sees the shard axis of each node only. The mean
    of the nodes' gradients is the gradient that all ranks would have computed together.

    After an exception in forward or backward the next forward raises, also if only FSDP2 has noticed the first one.
    """

    name = "fsdp"
    shards_weights = True
    takes = frozenset(
        "wrap_policy reshard_after_forward reshard_after_backward early_all_gather decoupled_nodes roots".split()
    )

    def __init__(self, mesh: DeviceMesh, options: ModeOptions) -> None:
        super().__init__(mesh, options)
        self._divisor: float | None = None
        self._host: AxisGroup | None = None  # All ranks of the mesh, in the memory of hosts; from `attach` on.
        self._used: list[bool] = []  # Whether this rank has a gradient for each watched parameter.
        # Number of a watched parameter -> its gradient; plain parameter -> its gradient, and a copy of its values.
        self._agreed: dict[int, TensorWeakRef] = {}
        self._plain_sums: dict[nn.Parameter, tuple[TensorWeakRef, Tensor]] = {}
        # The ranks whose gradients FSDP2 averages.
        self._reduced_over = shard_axis(mesh) if options.decoupled_nodes else mesh
        self._num_nodes = mesh.size() // self._reduced_over.size()
        self._node = mesh.get_local_rank(0) if options.decoupled_nodes else 0
        self._hooks = ExitStack()
        self._reducing: list[Any] = []  # Roots of a pipeline whose gradients are being reduced.
        # Units that `no_sync` has changed, with their settings from before.
        self._resharding: list[tuple[FSDPModule, list[Any]]] = []

    @override
    def prepare(self, module: nn.Module) -> None:
        if self.options.roots is None:
            shard_model(module, self.mesh, self.options)
        for root in self.options.roots or ():
            shard_model(root, self.mesh, replace(self.options, wrap_policy=()))
        initialize_roots(module)

    @override
    def watch(self, module: nn.Module) -> None:
        if self.call_log is not None:
            return
        self._module, self._roots = module, list(fsdp_roots(module))
        self.call_log = FsdpCallLog(module, self._reduced_over, is_pipeline=self.options.roots is not None)
        for unit in fsdp_modules(module):
            # Before the call is logged and FSDP2 gathers; and after FSDP2, also if forward has raised.
            before, after = (torch.compiler.disable(partial(hook, unit)) for hook in (self._enter, self._leave))
            self._hooks.enter_context(unit.register_forward_pre_hook(before, prepend=True))  # type: ignore[attr-defined]
            self._hooks.enter_context(unit.register_forward_hook(after, always_call=True))  # type: ignore[attr-defined]
            # Before the hooks of the log and of FSDP2, which add hooks to the returned tensors.
            self._hooks.enter_context(unit.register_forward_hook(_replace_views, prepend=True, with_kwargs=True))  # type: ignore[attr-defined]
            still_whole = torch.compiler.disable(partial(self._require_unwritten, unit))
            self._hooks.enter_context(unit.register_forward_hook(still_whole, prepend=True))  # type: ignore[attr-defined]

    def _require_unwritten(self, unit: FSDPModule, *_: Any) -> None:
        """Raise if the program has written to gathered weights, which are freed next; local.

        Checked in the steps 0, 1, 2, 4, 8, ... only: it reads all weights of this rank, and waits for the device.
        """
        assert self.call_log is not None
        step = self.call_log.step
        if step & (step - 1) or torch.is_inference_mode_enabled():
            return
        if names := overwritten_weights(unit):
            raise RuntimeError(
                f"the program has written to {len(names)} gathered weights ({clean_name(names[0])}, ...), which FSDP2 "
                "throws away, so that the old values would stay. Change weights between steps (in on_train_batch_end "
                "of a Trainer, for example), not in training_step or a forward; or use sharding='zero2' or 'ddp', "
                "where each rank has all weights"
            )

    def _enter(self, unit: FSDPModule, *_: Any) -> None:
        self.has_failed |= has_unfinished_backward(unit) and not is_in_backward()
        self.require_no_failure()

    def _leave(self, unit: FSDPModule, *_: Any) -> None:
        if has_unfinished_forward(unit):
            self.pass_failed()

    @override
    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        """Watch gradients of the model, whose weights must be materialized; each unit is gathered once."""
        self.watch(module)
        assert self.call_log is not None
        self._everyone = self.call_log.everyone
        self._host = host_group(axis_group(self.mesh, tuple(range(self.mesh.ndim))))
        self._places: list[tuple[nn.Module, str]] = []
        self._parameters: list[Tensor] = []
        self._used = []
        free_unsharded(module)
        # Parameters whose gradients FSDP2 does not reduce.
        self._plain = {p for p in module.parameters() if not isinstance(p, DTensor) and p.numel() > 0}
        self._zeros: dict[int, Tensor] = {}  # Number of whole weights -> a gradient of zeros that takes no memory.
        if self._everyone.group is not None:
            initialize_roots(module)
            for unit in fsdp_modules(module):
                self._watch_weights(unit, self.call_log)
        nodes = self.mesh if self.options.decoupled_nodes else None
        attach_optimizers(module, optimizers, layout=None, nodes=nodes)

    def _watch_weights(self, unit: FSDPModule, call_log: FsdpCallLog) -> None:
        """Hook the whole weights of a unit, which exist from the first all-gather on and are reused."""
        places = own_places(unit)
        frozen = [not getattr(owner, attribute).requires_grad for owner, attribute in places]
        wholes: list[Tensor] = []
        unit.unshard()
        for (owner, attribute), is_frozen in zip(places, frozen, strict=True):
            whole = getattr(owner, attribute)
            if not whole.is_floating_point():
                continue
            # Frozen weights are watched too, because they may be unfrozen later.
            whole.requires_grad_(True)
            self._hooks.enter_context(
                whole.register_post_accumulate_grad_hook(partial(_mark, self._used, len(self._used)))
            )
            if not hasattr(unit, "set_reduce_scatter_unused_params"):
                self._hooks.enter_context(whole.register_hook(partial(_make_room, TensorWeakRef(whole), self._zeros)))
            whole.requires_grad_(not is_frozen)
            self._places.append((owner, attribute))
            self._used.append(False)
            wholes.append(whole)
        unit.reshard()
        if hasattr(unit, "set_reduce_scatter_unused_params"):
            unit.set_reduce_scatter_unused_params(True, recurse=False)
        else:  # Before torch 2.13.
            call_log.before_backward[unit] = partial(_fill_with_zeros, wholes, self._zeros)

    @override
    @contextmanager
    def no_sync(self) -> Generator[None]:
        self.attached(self._host)
        # Each micro-batch gathers the weights again; or whole weights stay from the first forward to the last backward.
        if not self.options.reshard_after_backward and not self._resharding:
            self._resharding = [(unit, forward_resharding(unit)) for unit in fsdp_modules(self._module)]
            for unit, meshes in self._resharding:
                set_forward_resharding(unit, [None] * len(meshes))
        self._set_gradient_sync(False)
        try:
            yield
        finally:
            self._set_gradient_sync(True)

    def _set_gradient_sync(self, enabled: bool) -> None:
        """Choose, before the forward pass, whether the next backward pass reduces gradients over the mesh; local."""
        for unit in fsdp_modules(self._module):
            unit.set_requires_gradient_sync(enabled, recurse=False)
            # Otherwise the end of each micro-batch would wait for reductions and forget the prefetch order.
            unit.set_is_last_backward(enabled)
            if not self.options.reshard_after_backward:
                unit.set_reshard_after_backward(enabled, recurse=False)

    @override
    def reduce_part(self, modules: Sequence[nn.Module], scale: Tensor) -> None:
        assert self.call_log is not None
        for root in [each for module in modules for each in fsdp_roots(module)][::-1]:
            for gradient in unreduced_gradients(root):
                gradient.mul_(scale)
            for unit in fsdp_modules(root):  # type: ignore[arg-type]
                if unit in self.call_log.before_backward:
                    self.call_log.before_backward[unit]()
            start_reducing(root)
            self._reducing.append(root)
        # A wait in between would hold up the backward of this rank's other stages.
        if len(self._reducing) == len(self._roots):
            self._finish_reducing()
        for module in modules:
            for parameter in module.parameters():
                if parameter in self._plain and parameter.grad is not None:
                    parameter.grad.mul_(scale)

    def _finish_reducing(self) -> None:
        """Let the current stream wait for the reductions that :meth:`reduce_part` has begun; local."""
        for root in self._reducing:
            finish_reducing(root)
        self._reducing.clear()

    @override
    def set_gradient_divisor(self, divisor: float | None) -> None:
        self.attached(self._host)
        if divisor is not None:
            divisor /= self._num_nodes  # The average over nodes supplies that factor.
        if divisor != self._divisor:
            set_gradient_divisor(self._module, divisor)
            self._divisor = divisor

    @override
    def begin_backward(self) -> None:
        if self.call_log is not None:
            for root in self._roots:
                self._require_unwritten(root)

    @override
    def finish_gradients(self) -> None:
        """Average the gradients of plain parameters, and remove gradients that no rank has computed.

        If the ranks ran different units, this raises on all of them.
        """
        call_log = self.attached(self.call_log)
        self._finish_reducing()
        self.require_no_failure()
        for unit, meshes in self._resharding:
            set_forward_resharding(unit, meshes)
        self._resharding.clear()
        plain = [p for p in self._module.parameters() if p in self._plain and p.requires_grad]
        if self._everyone.group is not None:
            self._parameters = [getattr(owner, attribute) for owner, attribute in self._places]
            call_log.mark(END)
            self._drop_unused_gradients(maxima_over(self.attached(self._host), self._numbers()))
        else:
            call_log.restart()  # There is nobody to compare it with.
        if plain and (self._everyone.group is not None or self._divisor is not None):
            self._average(plain)

    def _numbers(self) -> list[int]:
        """The calls of units, and whether this rank has used each parameter, at the place of its node."""
        assert self.call_log is not None
        # Gradients may be accumulated over several steps: one that was kept before is kept until it is replaced.
        used = [
            was_used or (index in self._agreed and self._agreed[index]() is parameter.grad is not None)
            for index, (was_used, parameter) in enumerate(zip(self._used, self._parameters, strict=True))
        ]
        own = [*self.call_log.digest_numbers(), *used]
        before, after = self._node * len(own), (self._num_nodes - self._node - 1) * len(own)
        return [*[NO_DIGEST] * before, *own, *[NO_DIGEST] * after]

    def _drop_unused_gradients(self, maxima: Sequence[int]) -> None:
        """Remove gradients that no rank has computed. Collective over the mesh."""
        assert self.call_log is not None
        size, num_words = len(maxima) // self._num_nodes, len(self.call_log.digest_numbers())
        nodes = [maxima[start : start + size] for start in range(0, len(maxima), size)]
        own = nodes[self._node]
        self.call_log.require_equal(own[:num_words])
        if any(self.call_log.differs(each[:num_words]) for each in nodes):
            raise RuntimeError("The ranks of another node run different units of the model; see the error of its ranks")
        self._agreed = {}
        for index, (parameter, was_used) in enumerate(zip(self._parameters, own[num_words:], strict=True)):
            if not was_used:
                parameter.grad = None
            elif parameter.grad is not None:
                self._agreed[index] = TensorWeakRef(parameter.grad)
        self._used[:] = [False] * len(self._used)

    def _average(self, plain: Sequence[nn.Parameter]) -> None:
        """Replace the gradients of parameters that FSDP2 leaves out by (their sum over the ranks) / the divisor.

        Collective over the mesh. What an earlier call has reduced is not summed again.
        """
        dtype = torch.float64 if any(parameter.dtype == torch.float64 for parameter in plain) else torch.float32
        device = mesh_device(self._reduced_over)
        kept, added, present = [], [], []
        for parameter in plain:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            before = self._plain_sums.get(parameter)
            kept.append(before[1] if before and before[0]() is gradient else torch.zeros_like(parameter))
            added.append(gradient - kept[-1])
            present.append(torch.tensor([parameter.grad is not None], device=device))
        packed = torch.cat([each.detach().reshape(-1).to(device, dtype) for each in (*kept, *added, *present)])
        if self._everyone.group is not None:
            dist.all_reduce(packed, group=self._everyone.group)
        sizes = [parameter.numel() for parameter in plain]
        *sums, counts = packed.split([*sizes, *sizes, len(plain)])
        for index, (parameter, count) in enumerate(zip(plain, counts.tolist(), strict=True)):
            if count > 0:
                mean = sums[index] / self._everyone.size
                mean += sums[index + len(plain)] / (self._divisor or self._everyone.size)
                parameter.grad = gradient = mean.view(parameter.shape).to(parameter)
                self._plain_sums[parameter] = TensorWeakRef(gradient), gradient.clone()

    @override
    def finish_evaluation(self) -> None:
        """Compare the units that the ranks have run since the last step or evaluation."""
        if self.call_log is not None:
            self.require_no_failure()
            self.call_log.compare()

    @override
    def end_step(self) -> None:
        if self.options.early_all_gather and self.mesh.device_type == "cuda":
            # Weights are final here. FSDP2 takes one event for all units of a root, so it is that of the whole step.
            event = torch.cuda.current_stream().record_event()
            for root in fsdp_roots(self._module):
                root.set_post_optim_event(event)

    @override
    def close(self) -> None:
        # Module.to fails on gradients with a weak reference.
        self._agreed.clear()
        self._plain_sums.clear()
        self._reset()
        self._hooks.close()
        super().close()

    def _reset(self) -> None:
        """Reshard weights, and drop gradients of a failed pass, so that another run can begin; local."""
        if self.call_log is None:
            return
        self.has_failed |= not is_in_backward() and any(map(has_unfinished_backward, self._roots))
        with suppress(RuntimeError):  # From broken communication, which the original exception reports.
            for root in self._roots:
                reset_fsdp(root)
            for unit in fsdp_modules(self._module) if self.has_failed else ():
                drop_unreduced_gradients(unit)
