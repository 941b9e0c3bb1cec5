"""The part of the strategy that works while a Trainer runs: steps, gradients, evaluation."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_muon.checkpoint.nodes import NodeWeights, steps_left_out
from lightning_muon.engine.forward_methods import explain_shards
from lightning_muon.engine.gradient_rules import GradientRules
from lightning_muon.engine.options import LossScaling
from lightning_muon.grad_sync.token_count import TokenCount
from lightning_muon.monitor.watchdog import Watchdog
from lightning_muon.sharding.fsdp_runtime import free_unsharded
from lightning_muon.sharding.mode import ShardingMode
from lightning_muon.sharding.weights import broadcast_buffers

_READ_EARLY = (
    "With this sharding the weights of the last step arrive while the next forward runs, each before the forward of "
    "its module. A loss that reads weights in another way, such as a penalty on their norm, calls "
    "self.trainer.strategy.finish_parameters() first."
)


class SigtermHandler:
    """Keeps the handler of SIGTERM from hiding an error.

    Lightning's handler broadcasts. Launchers send SIGTERM to the ranks that are left when one has failed, where the
    communication is broken: the broadcast then raises, in the middle of clearing up, and its error takes the place of
    the one that says what has happened. So from an error on SIGTERM is ignored; the process ends anyway. If the
    program catches the error and trains on, the handler is put back.
    """

    def __init__(self) -> None:
        self._kept: Any = None

    @contextmanager
    def ignored_after_error(self) -> Generator[None]:
        """Ignore SIGTERM once the block has raised; the end of an iteration is no error."""
        try:
            yield
        except (StopIteration, GeneratorExit):
            raise
        except BaseException:
            self.ignore()
            raise

    def ignore(self) -> None:
        """From now on nothing happens on SIGTERM, if that was a function's business; local, main thread."""
        handler = signal.getsignal(signal.SIGTERM)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._kept = handler
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def restore(self) -> None:
        """Put back what :meth:`ignore` has taken away, unless there is another handler now; local, main thread."""
        if self._kept is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
            signal.signal(signal.SIGTERM, self._kept)
        self._kept = None


class RunningStrategy:
    """Runs the user's steps on a sharded module, and keeps its gradients and buffers equal in meaning on all ranks."""

    lightning_module: Any
    root_device: torch.device
    # Of the part that reads and writes checkpoints.
    _node_weights: NodeWeights
    _training_optimizers: Callable[[], list[torch.optim.Optimizer]]

    def __init__(self, *, loss_scaling: LossScaling, **kwargs: Any) -> None:
        self._loss_scaling = loss_scaling
        self._mode: ShardingMode | None = None
        self._rules: GradientRules | None = None
        self._tokens: TokenCount | None = None
        self._watchdog: Watchdog | None = None
        self._is_explaining = False
        self._sigterm = SigtermHandler()
        super().__init__(**kwargs)

    def report_tokens(self, num_tokens: int | Tensor) -> None:
        """Say how many tokens the loss that ``training_step`` is about to return sums over; local.

        With ``loss_scaling="tokens"`` every rank calls it once in each training step, and returns the sum of the losses
        of its tokens: gradients are divided by the number of tokens of all ranks and all accumulated micro-batches.

        Args:
            num_tokens: 0 or more; a tensor on the device is not waited for.
        """
        if self._loss_scaling != "tokens":
            raise RuntimeError(
                f"report_tokens has no meaning with loss_scaling={self._loss_scaling!r}, where training_step returns a "
                "mean; set ParallelMuonStrategy(loss_scaling='tokens')"
            )
        # A step that is shared with validation reports there too.
        if self._tokens is not None and self.lightning_module.trainer.training:
            self._tokens.report(num_tokens)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; one that has done its own backward passes, or none, leaves no whole weights behind."""
        if self._mode is not None:
            self._mode.begin_forward()
        if self._rules is not None:
            self._rules.begin_step()
        if self._tokens is not None:
            self._tokens.begin_micro_batch()
        with self._running():
            output = super().training_step(*args, **kwargs)
        if output is None:
            free_unsharded(self.lightning_module)
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; outside of it parameters are shards again, for hooks and callbacks."""
        return self._evaluate(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`validation_step`."""
        return self._evaluate(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`validation_step`."""
        return self._evaluate(super().predict_step, *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._mode is not None:
            self._mode.begin_forward()
        with self._running():
            output = step(*args, **kwargs)
        free_unsharded(self.lightning_module)
        return output

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Leave gradients unreduced: all but the last micro-batch of an accumulated one."""
        assert self._mode is not None and self._rules is not None, "setup comes first"
        before, self._rules.is_last_micro_batch = self._rules.is_last_micro_batch, False
        try:
            with self._mode.no_sync():
                yield
        finally:
            self._rules.is_last_micro_batch = before

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Before the last backward pass of a step the number of its tokens is known.

        Collective over all ranks with ``loss_scaling="tokens"``; every rank must call it.
        """
        super().pre_backward(closure_loss)
        if self._tokens is not None and self._rules.is_last_micro_batch:
            # Lightning divides the loss of each micro-batch by this, also in a window that is shorter.
            divided_by = self.lightning_module.trainer.accumulate_grad_batches
            self._mode.set_gradient_divisor(self._tokens.divisor(divided_by))

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Backward. Collective over all ranks in the last micro-batch; every rank must call it."""
        with self._explaining():
            try:
                return super().backward(closure_loss, *args, **kwargs)
            except BaseException as error:
                if self._tokens is not None:
                    self._tokens.reset()  # They go with the gradients.
                if self._mode is not None:
                    self._mode.backward_failed()
                    if self._mode.parameters_arrive_late and "modified by an inplace operation" in str(error):
                        error.add_note(_READ_EARLY)
                raise

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step. Collective over all ranks; every rank must call it."""

        def with_finished_gradients() -> Any:
            result = closure()
            if self._rules is not None:
                self._rules.finish_gradients()
            return result

        with self._explaining():
            result = super().optimizer_step(optimizer, with_finished_gradients, model, **kwargs)
            if self._mode is not None:
                self._mode.end_step()
        if self._rules is not None:
            self._rules.log_skipped(optimizer)
        return result

    @contextmanager
    def _running(self) -> Generator[None]:
        """Run one of the user's steps; if it raises, the model is ready for another run all the same."""
        with self._explaining(), explain_shards():
            try:
                yield
            except BaseException:
                if self._mode is not None:
                    self._mode.forward_failed()
                raise

    @contextmanager
    def _explaining(self) -> Generator[None]:
        """If communication is broken off because ranks wait for each other, say why."""
        if self._watchdog is None or self._is_explaining:
            yield
            return
        self._is_explaining = True
        self._watchdog.resume()
        self._sigterm.restore()
        try:
            with self._watchdog.explaining(), self._sigterm.ignored_after_error():
                yield
        finally:
            self._is_explaining = False

    def on_validation_start(self) -> None:
        """Evaluate with the running statistics of rank 0, as DDP does, and with weights that all nodes have."""
        self.finish_parameters()
        broadcast_buffers(self.lightning_module)
        if self._node_weights.show_common(self._training_optimizers()):
            self._weights_have_changed()
        super().on_validation_start()

    def on_validation_end(self) -> None:
        """The ranks have run the same units. Collective over all ranks; every rank must call it."""
        self._show_own_weights()
        self._finish_evaluation()
        super().on_validation_end()

    def on_test_end(self) -> None:
        """As :meth:`on_validation_end`."""
        self._finish_evaluation()
        super().on_test_end()

    def on_predict_end(self) -> None:
        """As :meth:`on_validation_end`."""
        self._finish_evaluation()
        super().on_predict_end()

    def _finish_evaluation(self) -> None:
        if self._mode is not None:
            self._mode.finish_evaluation()

    def on_train_end(self) -> None:
        """Leave equal running statistics on all ranks, and weights that all nodes have."""
        self.finish_parameters()
        broadcast_buffers(self.lightning_module)
        optimizers = self._training_optimizers()
        num_steps = steps_left_out(optimizers)
        if num_steps and self.is_global_zero:
            warnings.warn(
                "DiLoCo: the weights after fit are those of the last average, without what the nodes have learnt in "
                f"the last {num_steps} steps; let the number of steps be a multiple of the period, without overlap, or "
                "go on from the last checkpoint",
                stacklevel=2,
            )
        if self._node_weights.stay_common(optimizers):
            self._weights_have_changed()
        super().on_train_end()

    def _show_own_weights(self) -> None:
        """End what :meth:`on_validation_start` has begun; local."""
        if self._node_weights.show_own():
            self._weights_have_changed()

    def _weights_have_changed(self) -> None:
        """Let the next forward gather the weights of now; local."""
        free_unsharded(self.lightning_module)
        if self._mode is not None:
            self._mode.end_step()  # Gathers must not start where the last step ended.

    def finish_parameters(self) -> None:
        """Go on when every weight has its new value.

        With ``sharding="zero2"`` weights of the last step may still be on their way; the forward of a module, and
        ``state_dict``, wait by themselves.
        """
        if self._mode is not None:
            self._mode.finish_parameters()
