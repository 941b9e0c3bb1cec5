"""QK-Clip: after a step, smaller query and key weights for the heads whose attention logits have grown too large.

Source: Kimi Team 2025, Kimi K2, arXiv:2507.20534, section 2.1 and Algorithm 1.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_muon.comm.agreement import gather
from lightning_muon.comm.collectives import start_all_reduce_max, start_reading
from lightning_muon.comm.groups import axis_group
from lightning_muon.compat.hooks import ModuleHook
from lightning_muon.compat.torch import is_in_backward
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.math.attention_logits import clip_factors, max_logits
from lightning_muon.params.attention import (
    WHAT_TO_PASS,
    AttentionModule,
    HeadRows,
    Projection,
    ProjectionNames,
    find_attentions,
)
from lightning_muon.params.layout import held_boxes, local_tensor
from lightning_muon.sharding.weights import mesh_device

_SCALED_DOT_PRODUCT = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)
# Relative spread of |query| / |rows that make it| over tokens and heads. A rotary embedding leaves 1e-5 of it in
# float32 and 1e-3 in bfloat16; rows of other heads leave about 1 / sqrt(2 * size) between any two.
_MAX_SPREAD = 0.02


class QKClipper:
    """Observes attention in the training forward passes of an engine's module, and clips after its steps.

    The engine's module is sharded, and has no pipeline. Raises ``ValueError`` for attention modules whose projections
    cannot be told, on every rank, since all have the same modules.

    Args:
        engine: The engine of the training.
        names: Names of the projections, as the user gives them.
        threshold: ``tau``, the largest logit that is left alone.
        is_measured: Whether the current forward pass or step counts; the same on all ranks.
        log: Takes the largest logit of a step over all heads and ranks.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        names: ProjectionNames,
        *,
        threshold: float,
        is_measured: Callable[[], bool],
        log: Callable[[Tensor], None],
    ) -> None:
        self._engine, self._threshold, self._is_measured, self._log = engine, threshold, is_measured, log
        tensor = engine.meshes.tensor
        ranks = (0, 1) if tensor is None else (tensor.get_local_rank(), tensor.size())
        self._watched = {each.name: _Watched(each, *ranks) for each in find_attentions(engine.module, names)}
        self._running: list[_Watched] = []  # Modules whose forward is running, the innermost one last.
        self._mode = _Observer(self._running)
        self._scaling: _Scaling | None = None  # `None` until the ranks have told each other what they have.
        self._has_news: Callable[[], list[list[Any]]] | None = None
        self._hooks = ExitStack()
        for watched in self._watched.values():
            module = watched.attention.module
            begin, end = (
                ModuleHook(partial(self._begin_forward, watched)),
                ModuleHook(partial(self._end_forward, watched)),
            )
            self._hooks.enter_context(module.register_forward_pre_hook(begin))
            self._hooks.enter_context(module.register_forward_hook(end, always_call=True))
        engine.after_step.append(self.step_has_ended)

    def close(self) -> None:
        """Stop observing and clipping; local."""
        self._hooks.close()
        self._engine.after_step.remove(self.step_has_ended)

    def _begin_forward(self, watched: _Watched, *_: Any) -> None:
        # Activation checkpointing repeats forward passes in backward.
        if watched.is_trained and not is_in_backward() and self._is_measured():
            watched.begin_call()
            self._running.append(watched)
            self._mode.__enter__()

    def _end_forward(self, watched: _Watched, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._running and self._running[-1] is watched:
            self._mode.__exit__(None, None, None)
            self._running.pop()
            watched.end_call(has_failed=output is None)

    @torch.no_grad()
    def step_has_ended(self, is_skipped: bool) -> None:
        """Clip by the logits observed since the last step; a skipped step only drops them.

        Collective over all ranks in measured steps; every rank must call it. The host waits for the other ranks where
        an attention module has run for the first time.
        """
        if not self._is_measured():
            return
        if is_skipped:
            for watched in self._watched.values():
                watched.maxima = None
            return
        if self._scaling is None or (self._has_news is not None and self._has_news()[0][0] > 0):
            self._scaling = self._agree()
        maxima = self._reduce(self._scaling.watched)
        self._engine.mode.finish_parameters()
        self._scaling.apply_(clip_factors(maxima, self._threshold))
        self._log(maxima.max())

    def _agree(self) -> _Scaling:
        """Exchange the shapes of the attention modules that have run on any rank; raise for those with a problem.

        Collective over all ranks; every rank must call it.
        """
        mine = {name: (watched.shape, watched.problem) for name, watched in self._watched.items()}
        found = [(name, shape, problem) for each in gather(mine, None) for name, (shape, problem) in each.items()]
        problems = {name: problem for name, _, problem in found if problem}
        if problems:
            listed = [f"{name or 'the model'}: {problem}" for name, problem in problems.items()]
            raise ValueError(f"QKClip cannot clip the logits of {'; '.join(listed[:5])}. {WHAT_TO_PASS}")
        for name, shape, _ in found:
            self._watched[name].shape = shape or self._watched[name].shape
        known = [watched for watched in self._watched.values() if watched.shape is not None]
        if not known:
            raise ValueError(
                "QKClip: no attention module with weights that train has run in the first step; leave it out"
            )
        return _Scaling(known, self._device)

    def _reduce(self, known: Sequence[_Watched]) -> Tensor:
        """The largest logit of each head of these modules on any rank; NaN counts as infinite.

        Collective over all ranks; every rank must call it.
        """
        is_new = any(watched.has_run and watched not in known for watched in self._watched.values())
        parts = [watched.take_maxima(self._device) for watched in known]
        values = torch.cat([*parts, torch.full((1,), float(is_new), device=self._device)])
        values.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        mesh = self._engine.meshes.user
        group = axis_group(mesh, tuple(range(mesh.ndim)))
        if group.group is not None:
            start_all_reduce_max(values, group).wait()
        self._has_news = start_reading([values[-1:]])
        return values[:-1]

    @property
    def _device(self) -> torch.device:
        return mesh_device(self._engine.mesh)


class _Watched:
    """One attention module, and the largest logits of its heads since the last step."""

    def __init__(self, attention: AttentionModule, tensor_rank: int, num_tensor_ranks: int) -> None:
        self.attention = attention
        self.shape: tuple[int, int] | None = None  # Heads of all tensor-parallel ranks, and the elements of each.
        self.maxima: Tensor | None = None  # (heads), float32
        self.problem = ""
        self._tensor_rank, self._num_tensor_ranks = tensor_rank, num_tensor_ranks
        self._is_observed = False  # Whether the current call was observed.
        self._is_checked = attention.is_given
        self._outputs: dict[Projection, Tensor] = {}  # Of the current call, until the rows are checked.
        self._hooks = ExitStack()

    @property
    def is_trained(self) -> bool:
        """Whether all its projections train."""
        return all(parameter.requires_grad for parameter in self.attention.parameters)

    @property
    def has_run(self) -> bool:
        """Whether it has run, so that its shape or a problem is known."""
        return self.shape is not None or bool(self.problem)

    def begin_call(self) -> None:
        """Prepare for a forward of the module."""
        self._is_observed = False
        for projection in () if self._is_checked else {self.attention.query, self.attention.key}:
            if projection.module is not None:
                hook = ModuleHook(partial(self._keep, projection))
                self._hooks.enter_context(projection.module.register_forward_hook(hook))

    def _keep(self, projection: Projection, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self._outputs[projection] = local_tensor(output.detach())

    def end_call(self, *, has_failed: bool) -> None:
        """Clean up after a forward of the module, which may have raised."""
        self._hooks.close()
        self._outputs.clear()
        if not self._is_observed and not has_failed and not self._is_checked:
            self.problem = (
                "it has run, and has not called torch.nn.functional.scaled_dot_product_attention, where logits are "
                "observed; with transformers set attn_implementation='sdpa', which uses flash kernels, too"
            )

    def observe(self, query: Tensor, key: Tensor, *, scale: float, mask: Tensor | None, is_causal: bool) -> None:
        """Record the largest logits of queries and keys (batch, heads, positions, size)."""
        self._is_observed = True
        query, key = local_tensor(query.detach()), local_tensor(key.detach())
        try:
            query, mask, first = self._fit(query, key, mask)
            if not self._is_checked:
                self._check(query, key)
        except ValueError as error:
            if self._is_checked:
                raise
            self.problem = str(error)
            return
        self._is_checked = True
        found = max_logits(query, key, scale=scale, mask=mask, is_causal=is_causal)
        assert self.shape is not None
        if self.maxima is None:
            self.maxima = found.new_full((self.shape[0],), -math.inf)
        part = self.maxima[first : first + len(found)]
        torch.maximum(part, found, out=part)

    def take_maxima(self, device: torch.device) -> Tensor:
        """Return and reset the largest logits, -inf for heads that have not run."""
        assert self.shape is not None
        maxima, self.maxima = self.maxima, None
        return torch.full((self.shape[0],), -math.inf, device=device) if maxima is None else maxima.to(device)

    def _fit(self, query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
        """Return queries and mask by heads, and the index of the first head among those of all tensor ranks."""
        if query.ndim != 4 or key.ndim != 4:
            raise ValueError(f"its queries have the shape {tuple(query.shape)}, not (batch, heads, positions, size)")
        size = query.shape[3]
        num_heads, observed = self.attention.num_heads(query.shape[1], size), query.shape[1]
        if observed < num_heads == observed * query.shape[2] and observed == key.shape[1]:
            # transformers puts the heads of a group at the place of the positions if there is one position.
            query = query.flatten(1, 2).unsqueeze(2)
            mask = mask if mask is None or mask.shape[1] == 1 else mask.flatten(1, 2).unsqueeze(2)
            observed = num_heads
        if observed not in (num_heads, num_heads / self._num_tensor_ranks):
            raise ValueError(
                f"it has {observed} heads of {size}, but the {self.attention.query.num_rows} rows of "
                f"{self.attention.query.name!r} are {num_heads}"
            )
        if self.shape != (num_heads, size):
            self.attention.head_rows(num_heads, size)
            self.shape = num_heads, size
        return query, mask, 0 if observed == num_heads else self._tensor_rank * observed

    def _check(self, query: Tensor, key: Tensor) -> None:
        """Raise ``ValueError`` unless these queries and keys are made by the rows that are to be scaled."""
        assert self.shape is not None
        if query.shape[1] != self.shape[0]:  # The output has only some of the rows.
            return
        attention, rows = self.attention, self.attention.head_rows(*self.shape)
        made = [(attention.query, rows.query, query)]
        if attention.layout != "latent":  # There the key is made of two parts.
            made.append((attention.key, rows.key, key[:, :: key.shape[1] // len(rows.key)]))
        for projection, index, seen in made:
            output = self._outputs.get(projection)
            if output is not None and not _is_made_of(seen, output, index):
                raise ValueError(
                    f"its heads are not those rows of {projection.name!r} that they should be in the order "
                    f"{attention.layout!r}, or something between the two changes their norm"
                )


def _is_made_of(heads: Tensor, output: Tensor, rows: Tensor) -> bool:
    """Whether the norms of (batch, heads, positions, size) are proportional to those of ``rows`` of an output.

    A rotary embedding keeps norms. ``True`` where it cannot be told; waits for the device.
    """
    made = output.float().flatten(0, -2)[:, rows.to(output.device)].norm(dim=-1)  # (tokens, heads)
    norms = heads.float().norm(dim=-1)
    if norms.numel() != made.numel():
        return True
    for order in ((0, 2, 1), (2, 0, 1)):  # Batch or positions first.
        ratio = (norms.permute(order).reshape(made.shape) / made)[made > 0]
        if not ratio.numel() or bool(ratio.max() - ratio.min() <= _MAX_SPREAD * ratio.max()):
            return True
    return False


class _Scaling:
    """The local rows of all parameters that are scaled, each with its head and the power of that head's factor."""

    def __init__(self, watched: Sequence[_Watched], device: torch.device) -> None:
        self.watched = watched
        self._parts: list[tuple[nn.Parameter, int]] = []
        heads: list[Tensor] = []
        powers: list[Tensor] = []
        first = 0
        for each in watched:
            assert each.shape is not None
            for projection, head, power in _of_rows(each.attention, each.attention.head_rows(*each.shape)):
                for parameter, dim in ((projection.weight, projection.dim), (projection.bias, 0)):
                    if parameter is not None:
                        mine = _local_rows(parameter, dim)
                        self._parts.append((parameter, dim))
                        heads.append(first + head[mine])
                        powers.append(power[mine])
            first += each.shape[0]
        self._sizes = [len(part) for part in heads]
        self._heads, self._powers = torch.cat(heads).to(device), torch.cat(powers).to(device)

    def apply_(self, factors: Tensor) -> None:
        """Scale the rows by the factors of all heads; 1 leaves bits as they are. Local."""
        scales = (factors[self._heads] ** self._powers).split(self._sizes)
        for (parameter, dim), scale in zip(self._parts, scales, strict=True):
            local = local_tensor(parameter.detach())
            local.mul_(scale.to(local.device).unsqueeze(1 - dim) if local.ndim == 2 else scale.to(local.device))


def _of_rows(attention: AttentionModule, rows: HeadRows) -> list[tuple[Projection, Tensor, Tensor]]:
    """Each projection, with the head and the power of each of its rows; the power is 0 where there is none."""
    found: list[tuple[Projection, Tensor, Tensor]] = []
    group = len(rows.query) // len(rows.key)
    for projection in dict.fromkeys((attention.query, attention.key)):
        head = torch.zeros(projection.num_rows, dtype=torch.int64)
        power = torch.zeros(projection.num_rows)
        if projection is attention.query:
            head[rows.query] = torch.arange(len(rows.query))[:, None]
            power[rows.query] = rows.query_powers
        if projection is attention.key:
            head[rows.key] = group * torch.arange(len(rows.key))[:, None]
            power[rows.key] = rows.key_power
        found.append((projection, head, power))
    return found


def _local_rows(parameter: nn.Parameter, dim: int) -> slice:
    """The indices along ``dim`` that this rank holds."""
    if not isinstance(parameter, DTensor):
        return slice(None)
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    (box,) = held_boxes(tuple(parameter.shape), tuple(mesh.shape), parameter.placements, [tuple(coordinate)])
    return slice(box.start[dim], box.stop[dim])


class _Observer(TorchFunctionMode):
    """Gives the innermost running attention module the queries and keys of its attention call."""

    def __init__(self, running: Sequence[_Watched]) -> None:
        super().__init__()
        self._running = running

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Collection[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._scaled_dot_product(dict(zip(_SCALED_DOT_PRODUCT, args, strict=False)) | kwargs)
        elif func is F.multi_head_attention_forward:
            self._multi_head(_MULTI_HEAD.bind(*args, **kwargs).arguments)
        return func(*args, **kwargs)

    @torch.no_grad()
    def _scaled_dot_product(self, given: dict[str, Any]) -> None:
        query, key, scale = given["query"], given["key"], given.get("scale")
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        mask, is_causal = given.get("attn_mask"), given.get("is_causal", False)
        self._running[-1].observe(query, key, scale=scale, mask=mask, is_causal=is_causal)

    @torch.no_grad()
    def _multi_head(self, given: dict[str, Any]) -> None:
        """Observe ``nn.MultiheadAttention``, which projects inside this function and may compute logits itself."""
        weights = given["in_proj_weight"].chunk(3)
        biases = (None,) * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
        heads: list[Tensor] = []
        for name, weight, bias in zip(("query", "key"), weights, biases, strict=False):
            rows = F.linear(given[name], weight, bias)  # (positions, batch, rows), or no batch
            rows = rows.unsqueeze(1) if rows.ndim == 2 else rows
            heads.append(rows.unflatten(2, (given["num_heads"], -1)).permute(1, 2, 0, 3))
        query, key = heads
        mask, padding = _additive(given.get("attn_mask")), _additive(given.get("key_padding_mask"))
        if mask is not None and mask.ndim == 3:
            mask = mask.unflatten(0, (query.shape[0], query.shape[1]))
        if padding is not None:
            padding = padding.view(query.shape[0], 1, 1, key.shape[2])
            mask = padding if mask is None else mask + padding
        scale = 1 / math.sqrt(query.shape[-1])
        self._running[-1].observe(query, key, scale=scale, mask=mask, is_causal=False)


def _additive(mask: Tensor | None) -> Tensor | None:
    """A mask of ``nn.MultiheadAttention``, whose true elements hide keys, as a mask to add to logits."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(mask, -math.inf)
