"""One module in a loop of the user's: its optimizers, and what its gradients go through between backward and step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from lightning_muon.engine.conversion import OptimizerProxy, ReplacedParameters
from lightning_muon.engine.gradient_rules import GradientRules, SingleReductionGuard
from lightning_muon.engine.options import ClipGroups
from lightning_muon.monitor.watchdog import Watchdog
from lightning_muon.sharding.fsdp_runtime import free_unsharded
from lightning_muon.sharding.mode import ShardingMode


class Training:
    """What belongs to one prepared module.

    Args:
        module: The user's module, prepared by ``mode``.
        mode: How it is divided.
        replaced: The parameters that it had before.
        clip_groups: As in :class:`~lightning_muon.engine.gradient_rules.GradientRules`.
        max_skipped_steps: As there.
        max_silence: As in :class:`~lightning_muon.engine.options.Options`.

    Attributes:
        optimizers: Those that step it, in the order in which they were set up.
    """

    def __init__(
        self,
        module: nn.Module,
        mode: ShardingMode,
        replaced: ReplacedParameters,
        *,
        clip_groups: ClipGroups,
        max_skipped_steps: int,
        max_silence: timedelta | None = None,
    ) -> None:
        self.module, self.mode, self.replaced = module, mode, replaced
        self.optimizers: list[torch.optim.Optimizer] = []
        self._options: dict[str, Any] = {"clip_groups": clip_groups, "max_skipped_steps": max_skipped_steps}
        self._handles: list[OptimizerProxy] = []
        self._rules: _Rules | None = None
        self._max_silence = max_silence
        self._division: SingleReductionGuard | None = None
        self._watchdog: Watchdog | None = None
        self._has_run = False
        self._is_reduced = True
        self._watch()

    def attach(self, optimizers: Sequence[torch.optim.Optimizer], handles: Sequence[OptimizerProxy]) -> None:
        """Train with these optimizers, all that step the module. Collective over the mesh; every rank must call it.

        Args:
            optimizers: With routes, before their first step as far as they are new.
            handles: Of optimizers of the user that some of them have replaced.
        """
        if self.optimizers:
            # A mode is attached once, to all optimizers.
            self.close()
        self.optimizers = list(optimizers)
        self._handles += handles
        self.mode.attach(self.module, self.optimizers)
        self._rules = _Rules(self.module, self.mode, **self._options)
        self._watch()

    def current(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
        """The optimizer of this module that ``optimizer`` is, or that has replaced it; ``None`` if it is another's."""
        used = next((handle.used for handle in self._handles if handle.given is optimizer), optimizer)
        return next((own for own in self.optimizers if own is used), None)

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether any parameter of ``optimizer`` belongs to the module."""
        own = set(self.module.parameters())
        return any(parameter in own for group in optimizer.param_groups for parameter in group["params"])

    @contextmanager
    def around_forward(self) -> Generator[None]:
        """What is entered around each forward pass of the module."""
        self.mode.begin_forward()
        if torch.is_grad_enabled():
            self._has_run = True
            if self._rules is not None:
                self._rules.begin_step()
        with self.explaining():
            try:
                yield
            except BaseException:
                self.mode.forward_failed()
                raise

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Leave the gradients of this module unreduced; local."""
        rules = self._require_optimizers("no_backward_sync (no_sync)")
        before, rules.is_last_micro_batch = rules.is_last_micro_batch, False
        try:
            with self.mode.no_sync():
                yield
        finally:
            rules.is_last_micro_batch = before

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the next backward pass through this module reduces gradients."""
        return self._rules is not None and self._has_run and self._rules.is_last_micro_batch

    @property
    def gradient_note(self) -> str | None:
        """What whoever expects gradients in ``parameter.grad`` should know."""
        if not self.mode.parameters_arrive_late:
            return None
        return (
            f"sharding={self.mode.name!r}: parameter.grad is None after backward, since no rank has whole gradients; "
            "torch.nn.utils.clip_grad_norm_ would clip nothing, clip_gradients of a Fabric and clip_grad_norm_ of an "
            "Accelerator clip all of them"
        )

    @property
    def is_accumulating(self) -> bool:
        """Whether the micro-batch of now leaves gradients unreduced."""
        return self._rules is not None and not self._rules.is_last_micro_batch

    def divide_gradients_by(self, num_tokens: float) -> None:
        """Let the backward pass that comes next, the last of a step, divide the sums over the ranks by this.

        Local, the same on all ranks; from the first call on it belongs before each reducing backward pass.
        """
        self.mode.set_gradient_divisor(num_tokens)
        if self._division is None:
            parameters = [p for own in self.optimizers for group in own.param_groups for p in group["params"]]
            self._division = SingleReductionGuard(parameters, self.mode, type(self.module).__name__)

    @contextmanager
    def around_backward(self) -> Generator[None]:
        """Enter it around each backward pass.

        Collective over the mesh in the last micro-batch, if the module has run; every rank must call it.
        """
        division = self._division if self.is_last_micro_batch else None
        if division is not None:
            division.begin_backward()
        with self.explaining():
            try:
                yield
            except BaseException:
                self.mode.backward_failed()
                raise
            if self._rules is not None and self._has_run:
                self._is_reduced = self._rules.is_last_micro_batch
                self._rules.after_backward()
            if division is not None:
                division.end_backward()

    def clip_by_norm(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip, and return the norm before. Collective over the mesh; every rank must call it."""
        rules = self._reduced("clip_gradients")
        with self.explaining():
            rules.clip_by_norm(optimizer, max_norm)
        return rules.logged["grad_norm"]

    def clip_by_value(self, optimizer: torch.optim.Optimizer, max_value: float) -> None:
        """Clip element by element. Collective over the mesh; every rank must call it."""
        rules = self._reduced("clip_gradients")
        with self.explaining():
            rules.clip_by_value(optimizer, max_value)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        take_step: Callable[..., Any],
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Step. Collective over the mesh; every rank must call it.

        Args:
            optimizer: One of :attr:`optimizers`.
            take_step: What steps it; takes the optimizer, and a ``closure`` if there is one.
            closure: Computes gradients and returns the loss.
        """

        def with_finished_gradients() -> Any:
            result = None if closure is None else closure()
            rules = self._reduced("optimizer.step")
            rules.finish_gradients()
            rules.before_step(optimizer)
            return result

        with self.explaining():
            if closure is None:
                with_finished_gradients()
                result = take_step(optimizer)
            else:
                result = take_step(optimizer, closure=with_finished_gradients)
            # FSDP2 keeps the whole weights of its root after a forward that no backward has followed.
            self.weights_have_changed()
        self._has_run = False
        if self._division is not None:
            self._division.end_step()
        for handle in self._handles:
            if handle.used is optimizer:
                handle.follow()
        return result

    def skipped_steps(self, optimizer: torch.optim.Optimizer) -> int:
        """How many steps of one of :attr:`optimizers` a NaN or Inf has made all ranks skip so far; local."""
        return self._require_optimizers("skipped_steps").skipped_steps(optimizer)

    def weights_have_changed(self) -> None:
        """Let the next forward gather the weights of now; local."""
        free_unsharded(self.module)
        self.mode.end_step()

    @contextmanager
    def explaining(self) -> Generator[None]:
        """If communication is broken off because ranks wait for each other, say why."""
        if self._watchdog is None:
            yield
            return
        self._watchdog.resume()
        with self._watchdog.explaining():
            yield

    def program_ends(self) -> None:
        """Tell the other ranks if an exception in the user's loop ends the program; :meth:`close` follows. Local."""
        if self._watchdog is not None:
            self._watchdog.program_ends()

    def close(self) -> None:
        """Remove all hooks; the module stays divided. Local."""
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if self._division is not None:
            self._division.close()
            self._division = None
        self.mode.close()

    def _watch(self) -> None:
        self.mode.watch(self.module)
        if self._watchdog is None:
            assert self.mode.call_log is not None
            self._watchdog = Watchdog(self.mode.call_log, silence=self._max_silence)
            self._watchdog.start()

    def _require_optimizers(self, what: str) -> _Rules:
        if self._rules is None:
            raise RuntimeError(
                f"{what} of a module that no optimizer was set up for; set up (prepare) one with its parameters"
            )
        return self._rules

    def _reduced(self, what: str) -> _Rules:
        """The rules, once a backward pass outside of ``no_backward_sync`` has reduced the gradients."""
        rules = self._require_optimizers(what)
        if not self._is_reduced:
            raise RuntimeError(
                f"{what} after micro-batches that were all inside of no_backward_sync (no_sync), so the ranks have "
                "gradients of their own; run forward and backward of the last micro-batch of a step outside of it"
            )
        return rules


class _Rules(GradientRules):
    """The rules of a Trainer's strategy, where the loop is the user's: there is nobody else to log to."""

    def __init__(self, module: nn.Module, mode: ShardingMode, **options: Any) -> None:
        super().__init__(module, mode, **options)
        self._module = self
        self.automatic_optimization = True  # Every backward pass is inside of around_backward.
        self.logged: dict[str, Tensor] = {}

    def log(self, name: str, value: Tensor) -> None:
        """Keep what was logged last."""
        self.logged[name] = value
