"""One program that trains, whichever framework runs its loop: models, tokens, checkpoints, watchdog, and its end."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_muon.checkpoint.loading import Checkpoint
from lightning_muon.checkpoint.saving import BackgroundSaves, Filters, Format, Parts, save
from lightning_muon.comm.collectives import all_ranks, host_group, own_group
from lightning_muon.compat.torch import free_unsharded
from lightning_muon.engine.mesh_sizes import Meshes
from lightning_muon.engine.options import Options
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.monitor.watchdog import Watchdog, watch_setup
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.tokens import TokenCount


class Session:
    """What an integration asks of the package, in its framework's words: one for each strategy or Accelerator.

    The order of calls: :meth:`begin`; for each model :meth:`shard`, and what its engine does; in loops of the user
    :meth:`report_tokens` and :meth:`around_backward`; :meth:`save` and :meth:`load`; :meth:`close`, after which it may
    begin again. Methods are collective over all ranks unless they say that they are local.
    """

    def __init__(self, options: Options, *, info: Callable[[str], None], warn: Callable[[str], None]) -> None:
        # Read when NCCL opens a connection: what waits for other ranks gets the card before what does not.
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
        self.options = options
        self.engines: list[TrainingEngine] = []  # One for each model.
        self.meshes: Meshes | None = None  # From `begin` on; they and the saves stay for the next run.
        self.saves: BackgroundSaves | None = None
        self.tokens: TokenCount | None = None  # One count for all models.
        self._info, self._warn = info, warn
        self._watchdog: Watchdog | None = None  # Until the next engine has it.
        # A loop of the user has no end; the other ranks should know when this one has come to it.
        weakref.finalize(self, _end, self.engines)

    # ---- before the first step

    def watch(self) -> None:
        """Watch the ranks while there is no model yet."""
        if self._watchdog is None:
            self._watchdog = watch_setup(self, silence=self.options.max_silence)

    def begin(self, make_meshes: Callable[[], Meshes]) -> Meshes:
        """Return the meshes of the program, made once; the default process group is there."""
        if self.meshes is None:
            self.meshes = make_meshes()
            if self.options.async_save:
                self.saves = BackgroundSaves(own_group(host_group(all_ranks())))
        self.watch()
        return self.meshes

    def shard(
        self, module: nn.Module, device: torch.device, *, mode_options: ModeOptions, **of_loop: Any
    ) -> TrainingEngine:
        """Return the engine of a sharded module, in place of the one that it had; ``of_loop`` is for the engine."""
        assert self.meshes is not None, "begin comes first: fabric.launch(), setup_environment"
        if (before := self.engine_with(module)) is not None:
            before.close()
            self.engines.remove(before)
        for other in self.engines:
            if other.optimizers and not set(module.parameters()).isdisjoint(other.module.parameters()):
                raise ValueError(
                    f"{type(module).__name__} shares parameters with {type(other.module).__name__}, which has been "
                    "set up with optimizers of its own; set up one module that holds all parameters they share"
                )
        try:
            engine = TrainingEngine(
                module,
                self.options,
                self.meshes,
                mode_options=mode_options,
                info=self._info,
                warn=self._warn,
                saves=self.saves,
                watchdog=self._watchdog,
                tokens=self.tokens,
                **of_loop,
            )
            self.tokens, self._watchdog = engine.tokens, None
            self.engines.append(engine)
            engine.shard(device)
        except BaseException as error:
            self.failed(error)
            raise
        return engine

    def engine_with(self, module: nn.Module) -> TrainingEngine | None:
        """The engine of this module, if there is one; local."""
        return next((engine for engine in self.engines if engine.module is module), None)

    def engine_of(self, optimizer: torch.optim.Optimizer) -> tuple[TrainingEngine, torch.optim.Optimizer]:
        """The engine that this optimizer, or the one in its place, was attached to, and the latter; local."""
        for engine in self.engines:
            if (current := engine.current(optimizer)) is not None:
                return engine, current
        raise ValueError(
            f"this {type(optimizer).__name__} was not set up; use what fabric.setup or setup_optimizers has returned"
        )

    # ---- losses of a loop of the user

    def report_tokens(self, num_tokens: int | Tensor, *, in_step: bool = False) -> None:
        """Count the tokens of the loss whose backward pass comes next, or that of the step that runs; local."""
        if self.tokens is None:
            raise RuntimeError(
                "report_tokens needs the option loss_scaling='tokens', without which a loss is a mean, and comes after "
                "the model was set up (fabric.setup, accelerator.prepare)"
            )
        (self.tokens.report if in_step else self.tokens.report_before_backward)(num_tokens)

    @contextmanager
    def around_backward(self, *, loss_divided_by: int = 1) -> Generator[None]:
        """Context to enter around a backward pass, which may go through any of the models."""
        if self.tokens is not None:
            self.tokens.begin_backward()
            last = [engine for engine in self.engines if engine.is_last_micro_batch]
            if last and any(engine.is_accumulating for engine in self.engines):
                raise RuntimeError(
                    f"no_backward_sync of some models, but not of {type(last[0].module).__name__}: tokens "
                    "(loss_scaling='tokens') are counted for all models together; enter that of each of them"
                )
        with ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.around_backward(loss_divided_by=loss_divided_by))
            yield

    # ---- checkpoints

    @property
    def saves_one_file(self) -> bool:
        """Whether all models are small enough for single files, if the user has not said what checkpoints are."""
        are_small = [engine.saves_one_file for engine in self.engines]
        return self.options.save_distributed_checkpoint is not True and all(are_small)

    def save(
        self,
        places: Mapping[Path, Parts],
        *,
        whole: bool,
        metadata_name: str | None = None,
        filters: Filters | None = None,
    ) -> None:
        """Write checkpoints in place of what is there; see :func:`lightning_muon.checkpoint.saving.save`."""
        self._free_whole_weights()
        about = {key: value for engine in self.engines for key, value in engine.description().items()}
        save(places, Format(whole=whole, metadata_name=metadata_name, about=about, saves=self.saves), filters)

    def load(self, checkpoint: Checkpoint, parts: Parts, target: dict[str, Any], *, strict: bool) -> dict[str, Any]:
        """Load the parts, and return what else is there; see :meth:`Checkpoint.load`."""
        self._free_whole_weights()
        rest = checkpoint.load(parts, target, strict=strict)
        for engine in self.engines:
            engine.weights_have_changed()
        return rest

    def _free_whole_weights(self) -> None:
        """Let weights be shards, also those that an evaluation has left whole; local."""
        for engine in self.engines:
            free_unsharded(engine.module)

    def finish_saving(self) -> None:
        """Wait until what ``async_save=True`` writes is written."""
        if self.saves is not None:
            self.saves.finish()

    # ---- errors and the end

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed, and why; local."""
        for engine in self.engines:
            engine.failed(error)
        if self._watchdog is not None:  # There is no engine yet.
            self._watchdog.failed(error)

    def close(self) -> None:
        """Remove all hooks; modules stay sharded, and can be saved."""
        self.finish_saving()
        while self.engines:
            self.engines.pop().close()
        self.tokens = None
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None


def _end(engines: Sequence[TrainingEngine]) -> None:
    """Tell the other ranks of an exception that ends the program, and close the engines; local."""
    for engine in engines:
        engine.program_ends()
    for engine in engines:
        engine.close()
