"""The strategies ``"parallel_muon"`` and ``"flexdemo"`` of a Trainer, for either package; see the registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon.checkpoint.loading import Checkpoint
from lightning_muon.checkpoint.saving import OptimizerState, collect, whole_on_first_rank, write
from lightning_muon.checkpoint.staging import discard, local_path
from lightning_muon.comm.agreement import missing_at, require_equal, together
from lightning_muon.compat.lightning import (
    MONITOR_CANDIDATES,
    apply_layer_sync,
    is_placeholder_optimizer,
    metadata_filename,
    set_device_mesh,
    set_sampler_epoch,
)
from lightning_muon.compat.torch import default_store, free_unsharded
from lightning_muon.config import takes_options
from lightning_muon.engine.model_setup import register_steps, unshard_on_call
from lightning_muon.engine.options import Options
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.integrations.lightning.callbacks import (
    AVERAGE,
    PREFIX_OF_REQUEUE,
    candidates,
    order,
    share_metrics,
)
from lightning_muon.integrations.lightning.resuming import KEY, TrainingData
from lightning_muon.integrations.lightning.trainer import (
    check_run,
    gradient_readers,
    has_default_optimizer,
    provide_default_optimizer,
    reads_weights_between_steps,
    require_own_files,
    require_single_batches,
    sharded_plugin,
)
from lightning_muon.integrations.registry import make
from lightning_muon.integrations.strategy import MuonStrategy
from lightning_muon.optim.gradients import skipped_steps
from lightning_muon.pipeline.runtime import GIVE_ALL

_SECONDS_TO_FAIL_TOGETHER = 10.0


@takes_options(Options)
class TrainerStrategy(MuonStrategy):
    """Trains any LightningModule with FSDP2 hybrid sharding and ParallelMuon.

    The base class beside it is the ``ModelParallelStrategy`` of one Lightning package: launcher, process group, and the
    writing of checkpoints are Lightning's. No ``configure_model`` is needed; one that shards parts of the model, or
    creates it on the meta device, is respected. Its arguments are the fields of :class:`~lightning_muon.Options`.

    Example::

        trainer = Trainer(accelerator="cpu", devices=4, strategy=ParallelMuonStrategy(replicate_size=2, shard_size=2))
        trainer.fit(model)
    """

    user = "Trainers of {}"
    # Of the class beside it.
    lightning_module: Any
    optimizers: list[torch.optim.Optimizer]
    broadcast: Callable[..., Any]

    _engine: TrainingEngine | None = None
    _checkpoint: Checkpoint | None = None  # It is opened before `setup`, for callbacks.
    # Whether the names of weights that wait there for the model to be sharded must be those of the model.
    _is_strict: bool | None = None
    _first_callback: Any = None
    _data = TrainingData()  # Each run gets its own; a run may fail before.

    # ---- before the first step

    @property
    def precision_plugin(self) -> Any:
        """Lightning's precision plugin, or its counterpart for shards."""
        return super().precision_plugin  # type: ignore[misc]

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        converted = None if plugin is None else sharded_plugin(plugin, self.package)
        super(TrainerStrategy, type(self)).precision_plugin.fset(self, converted)  # type: ignore[attr-defined]

    def connect(self, model: Any) -> None:
        """Take the module of this run; without ``configure_optimizers`` it gets one."""
        super().connect(model)  # type: ignore[misc]
        self._data = TrainingData()
        provide_default_optimizer(model, self.options.config, self.package)

    def setup_environment(self) -> None:
        """Start the process group and make the mesh. Collective over all ranks."""
        check_run(self.lightning_module, self.options, self.package)
        set_device_mesh(self, self._start_processes().user)
        callbacks = self.lightning_module.trainer.callbacks
        order(callbacks)
        self._first_callback = make("FirstCallback", self.package.name)()
        callbacks.insert(0, self._first_callback)

    def setup(self, trainer: Any) -> None:
        """Shard the model, load weights, create optimizers. Collective over all ranks."""
        if self._checkpoint is None:
            _require_same_checkpoint(None)
        for each in trainer.checkpoint_callbacks:
            local_path(getattr(each, "dirpath", None) or "")
            share_metrics(each, self.package)
        if self.options.async_save:
            require_own_files(trainer, self.package)
        self.accelerator.setup(trainer)
        # FSDP2 keeps the tensors into which it gathers weights. Made in inference mode they could not be used by a
        # later training step. Lightning makes the same exception for its FSDPStrategy.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        module: Any = self.lightning_module
        apply_layer_sync(self, module)

        self.model = self.precision_plugin.convert_module(module)
        self._engine = engine = self._shard(
            module,
            self.precision_plugin,
            # A step that runs several backward passes needs each child to gather its own weights anew.
            shard_root=module.automatic_optimization,
            wait_for_parameters=reads_weights_between_steps(trainer, self.options, self.package),
            is_loop_of_user=False,
            sees_every_backward=module.automatic_optimization,
        )
        if engine.pipeline is not None:
            engine.pipeline.context.forward_context = self.precision_plugin.compute_context
            # Lightning would call it behind the training step, in which backward has run.
            module.optimizer_zero_grad = lambda *_: None
        register_steps(module)
        unshard_on_call(module)
        self.barrier()  # type: ignore[attr-defined]
        self._load_pending_weights()

        self.precision_plugin.engine = engine
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
            if engine.mode.parameters_arrive_late and (readers := gradient_readers(trainer, self.package)):
                self.package.fabric("utilities.rank_zero").rank_zero_warn(
                    f"{', '.join(readers)}: with sharding={self.options.sharding!r} no rank has whole gradients, so "
                    "parameter.grad is None there, and changing it has no effect; use sharding='ddp' or 'fsdp' instead"
                )
        self.setup_precision_plugin()  # type: ignore[attr-defined]

    def setup_optimizers(self, trainer: Any) -> None:
        """Call ``configure_optimizers`` and decide what becomes of its result."""
        # In a pipeline ranks have different parameters, so that one may fail alone.
        together(partial(self._create_optimizers, trainer))
        given = [each for each in self.optimizers if not is_placeholder_optimizer(self.package, each)]
        unnamed = [each for each in self.lr_scheduler_configs if each.name is None]  # type: ignore[attr-defined]
        names = [f"lr-{type(each.scheduler.optimizer).__name__}" for each in unnamed]
        used = self._running_engine.attach(
            given,
            [config.scheduler for config in self.lr_scheduler_configs],  # type: ignore[attr-defined]
            source="what configure_optimizers returned",
            is_default=has_default_optimizer(self.lightning_module),
        )
        self.optimizers = used or self.optimizers
        for number, (config, name) in enumerate(zip(unnamed, names, strict=True)):
            # As LearningRateMonitor would call it without us.
            same = names[:number].count(name)
            config.name = f"{name}-{same}" if same else name

    def _create_optimizers(self, trainer: Any) -> None:
        try:
            super().setup_optimizers(trainer)  # type: ignore[misc]
        except ValueError as error:
            if self.options.pipeline_size > 1 and "empty parameter list" in str(error):
                raise ValueError(f"{error}: nothing in the stages of this rank is trained; {GIVE_ALL}") from error
            raise

    # ---- steps

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let a resumed run go on with the order of its epoch."""
        # Lightning sets the epoch of samplers behind the iterator, which draws at once with workers or batch_size=None.
        trainer = self.lightning_module.trainer
        epoch = self._data.epoch_to_come(trainer)
        set_sampler_epoch(self.package, dataloader, epoch)
        dataloader = super().process_dataloader(dataloader)  # type: ignore[misc]
        if trainer.training:
            dataloader = self._data.follow(dataloader, epoch, trainer)
        return dataloader

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Go on with the random states of a checkpoint, if no loader has restored them."""
        self._data.batch_begins(self.lightning_module.trainer.current_epoch)
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]

    def report_tokens(self, num_tokens: int | Tensor) -> None:
        """Say how many tokens the loss that ``training_step`` is about to return sums over; local.

        With ``loss_scaling="tokens"`` every rank calls it once in each training step, and returns the sum of the losses
        of its tokens: gradients are divided by the number of tokens of all ranks and all accumulated micro-batches.

        ``num_tokens`` is 0 or more; a tensor on the device is not waited for.
        """
        # A step that is shared with validation reports there too.
        if self.options.loss_scaling != "tokens" or self.lightning_module.trainer.training:
            self._session.report_tokens(num_tokens, in_step=True)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; one that has done its own backward passes, or none, leaves no whole weights behind."""
        engine = self._running_engine
        if engine.pipeline is not None:  # It runs forward and backward of a batch; every rank gets the loss.
            require_single_batches(self.lightning_module.trainer)
            self.lightning_module.zero_grad()
            loss = engine.run_pipeline(args[0])
            self.lightning_module.log("train_loss", loss, prog_bar=True)
            return loss
        if engine.tokens is not None:
            engine.tokens.begin_micro_batch()
        output = self._run_step("training_step", *args, **kwargs)
        if output is None:
            free_unsharded(self.lightning_module)
        return output

    def _run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(super(), name)(*args, **kwargs)
        except StopIteration as error:
            if "dataloader_iter" in inspect.signature(getattr(self.lightning_module, name)).parameters:
                raise  # Its iterator has come to its end.
            # Lightning would take it for the end of the data, on this rank only.
            raise RuntimeError(f"{name} raised StopIteration: {error}") from error

    validation_step = partialmethod(_run_step, "validation_step")
    test_step = partialmethod(_run_step, "test_step")
    predict_step = partialmethod(_run_step, "predict_step")

    def block_backward_sync(self) -> Any:
        """Leave gradients unreduced: all but the last micro-batch of an accumulated one."""
        return self._running_engine.no_sync()

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Backward. Collective over all ranks in the last micro-batch."""
        if self._running_engine.pipeline is not None:
            # Backward has run; what is left are the hooks of Lightning around it.
            self.pre_backward(closure_loss)  # type: ignore[attr-defined]
            loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
            loss = self.precision_plugin.post_backward(loss, self.lightning_module)
            self.post_backward(loss)  # type: ignore[attr-defined]
            return loss
        # Lightning divides the loss of each micro-batch by this, also in a window that is shorter.
        divided_by = self.lightning_module.trainer.accumulate_grad_batches
        with self._running_engine.around_backward(loss_divided_by=divided_by):
            return super().backward(closure_loss, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step. Collective over all ranks."""
        engine = self._running_engine
        take_step = partial(super().optimizer_step, model=model, **kwargs)  # type: ignore[misc]
        result = engine.step(optimizer, take_step, closure)
        self._data.window = None
        if skipped := skipped_steps(optimizer):
            self.lightning_module.log("skipped_steps", float(skipped))
        return result

    # ---- evaluation and the end

    def on_validation_start(self) -> None:
        """Evaluate with the running statistics of rank 0, as DDP does, and with weights that all nodes have."""
        self._running_engine.begin_evaluation()

    def on_validation_end(self) -> None:
        """The ranks have run the same units. Collective over all ranks."""
        self._running_engine.end_evaluation()

    on_test_end = on_predict_end = on_validation_end

    def on_train_end(self) -> None:
        """Leave equal running statistics on all ranks, and weights that all nodes have."""
        self._running_engine.end_training()
        self.finish_saving()

    def finish_parameters(self) -> None:
        """Wait for the weights of the last step; a forward pass, and ``state_dict``, wait by themselves. Local."""
        if self._engine is not None:
            self._engine.mode.finish_parameters()

    def weights_have_changed(self) -> None:
        """Let the next forward gather the current weights; local."""
        self._running_engine.weights_have_changed()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks why they will wait in vain, and wait for what is being saved; local."""
        told_to_end = self.package.module("utilities.exceptions").SIGTERMException  # Raised on all ranks together.
        if not isinstance(exception, told_to_end):
            self._session.failed(exception)
        if self._session.saves is not None:  # The others, who know by now, let it end.
            self._session.saves.give_up()
        super().on_exception(exception)  # type: ignore[misc]

    def teardown(self) -> None:
        """End the run; the model stays sharded."""
        self.finish_saving()
        self._checkpoint = None
        if has_default_optimizer(self.lightning_module):
            del self.lightning_module.configure_optimizers
        vars(self.lightning_module).pop("optimizer_zero_grad", None)
        callbacks = self.lightning_module.trainer.callbacks
        for each in callbacks:
            vars(each).pop(MONITOR_CANDIDATES, None)
        if self._first_callback in callbacks:
            callbacks.remove(self._first_callback)
        self._session.close()
        self._data.release()
        self._first_callback = self.precision_plugin.engine = None
        super().teardown()  # type: ignore[misc]

    # ---- checkpoints

    # The file is opened before setup, for callbacks; weights and states of optimizers follow.
    restore_checkpoint_after_setup = False
    # Lightning calls load_optimizer_state_dict after on_fit_start.
    lightning_restore_optimizer = True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights: shards, or on rank 0 all of them. Collective over all ranks."""
        _require_all_ranks(self.lightning_module.trainer)
        free_unsharded(self.lightning_module)
        engine = self._running_engine
        return collect(engine.weights, engine.format(whole=engine.saves_one_file))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """State by name in shards, or by number on rank 0. Collective over all ranks."""
        plain = getattr(optimizer, "optimizer", optimizer)  # Lightning wraps optimizers.
        if is_placeholder_optimizer(self.package, plain):
            return {}
        engine = self._running_engine
        return collect(OptimizerState(engine.module, plain), engine.format(whole=engine.saves_one_file))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write shards or one file; replaces what is there. Collective over all ranks.

        A plugin of the user that writes single files (a ``CheckpointIO``) is left to do it in its own way.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} has no CheckpointIO that could take storage_options")
        whole = self._running_engine.saves_one_file
        self._leave_out_modules(checkpoint)
        if "loops" in checkpoint:
            checkpoint[KEY] = self._data.state(self._num_data_ranks, self.lightning_module.trainer)
        if whole and type(self.checkpoint_io) is not self.package.fabric("plugins").TorchCheckpointIO:  # type: ignore[attr-defined]
            if self.is_global_zero:  # type: ignore[attr-defined]
                self.checkpoint_io.save_checkpoint(checkpoint, filepath)  # type: ignore[attr-defined]
            return
        target, rest = local_path(self.broadcast(filepath)), dict(checkpoint)
        content, metadata_name = {}, None
        if not whole:
            states, metadata_name = enumerate(rest.pop("optimizer_states", [])), metadata_filename(self.package)
            content = {f"optimizer_{index}": state for index, state in states}
            content |= {key: rest.pop(key) for key in ("state_dict", AVERAGE) if key in rest}
        about = {"step": rest.get("global_step"), "weights_only": "loops" not in rest}
        how = self._running_engine.format(whole=whole, metadata_name=metadata_name, **about)
        write({target: (content, rest)}, how)
        # Behind a fit the program may end; SLURM ends it once Lightning has saved for a requeue.
        is_last = self.lightning_module.trainer.state.status != "running" or target.name.startswith(PREFIX_OF_REQUEUE)
        if is_last and how.saves is not None:
            how.saves.finish()

    def averages_to_save(self, averages: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint has of those of ``EMAWeights``: shards, or on rank 0 all. Collective over all ranks."""
        return whole_on_first_rank(averages) if self._running_engine.saves_one_file else dict(averages)

    def load_averages(self, averages: dict[str, Tensor]) -> bool:
        """Fill them from the checkpoint of a resumed run; return whether it has them. Collective over all ranks."""
        return self._checkpoint is not None and self._checkpoint.load_tensors(AVERAGE, self.lightning_module, averages)

    def _leave_out_modules(self, checkpoint: dict[str, Any]) -> None:
        """Drop hyper-parameters that are parts of the module: shards cannot be pickled, and are saved anyway."""
        key, parts = self.lightning_module.CHECKPOINT_HYPER_PARAMS_KEY, set(self.lightning_module.modules())
        given: Mapping[str, Any] = checkpoint.get(key) or {}
        left_out = [name for name, value in given.items() if isinstance(value, nn.Module) and value in parts]
        if left_out:
            checkpoint[key] = {name: value for name, value in given.items() if name not in left_out}

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint; local, done by rank 0."""
        if self.is_global_zero:  # type: ignore[attr-defined]
            remove = partial(discard, Path(filepath))
            saves = self._session.saves
            remove() if saves is None else saves.after_commit(remove)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint; everything but tensors. Collective over all ranks."""
        path, trainer = local_path(checkpoint_path), self.lightning_module.trainer
        is_fit = trainer.state.fn == "fit"
        self.finish_saving()
        _require_same_checkpoint(path)
        self._checkpoint = opened = Checkpoint.open(
            *candidates(trainer, path) if is_fit else [path],
            metadata_name=metadata_filename(self.package),
            weights_only=weights_only,
        )
        if opened.is_sharded and (num_optimizers := len(opened.shards_with("optimizer_"))):
            # Lightning asks whether the key is there; the states follow later.
            opened.content["optimizer_states"] = [{} for _ in range(num_optimizers)]
        if is_fit:
            by_steps = trainer.max_steps != -1
            self._data.resume(self._checkpoint.content, self._num_data_ranks, by_steps=by_steps)
        return self._checkpoint.content

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights once the model is sharded: now or in :meth:`setup`."""
        assert self._checkpoint is not None
        self._is_strict, self._checkpoint.content["state_dict"] = strict, checkpoint.get("state_dict", {})
        if self._engine is not None and self._engine.module is self.lightning_module:
            self._load_pending_weights()

    def _load_pending_weights(self) -> None:
        if self._checkpoint is not None and self._is_strict is not None:
            for optimizer in self.optimizers:
                if isinstance(optimizer, FlexDeMo):
                    optimizer.forget_own_weights()
            self._checkpoint.load_weights("state_dict", self._running_engine.module, strict=self._is_strict)
            self._is_strict = None

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of all optimizers. Collective over all ranks."""
        assert self._checkpoint is not None
        opened, num_saved = self._checkpoint, len(checkpoint["optimizer_states"])
        if num_saved == 0:  # Weights alone, as `lightning-muon convert` makes them of safetensors.
            self._checkpoint = None
            return
        if num_saved != len(self.optimizers):
            raise ValueError(
                f"{opened.path} has the states of {num_saved} optimizers, configure_optimizers {len(self.optimizers)}"
            )
        states = enumerate(checkpoint["optimizer_states"])
        opened.content |= {f"optimizer_{index}": state for index, state in states}
        for index, optimizer in enumerate(self.optimizers):
            if not is_placeholder_optimizer(self.package, optimizer):
                opened.load_optimizer(f"optimizer_{index}", self._running_engine.module, optimizer)
        self._checkpoint = None

    @property
    def _num_data_ranks(self) -> int:
        return self.distributed_sampler_kwargs["num_replicas"]

    @property
    def _running_engine(self) -> TrainingEngine:
        assert self._engine is not None, "setup comes first"
        return self._engine


def _require_same_checkpoint(path: Path | None) -> None:
    """Raise on all ranks unless they go on from the same checkpoint, or from none.

    Collective over all ranks, where it has chosen.
    """
    require_equal([("ckpt_path", "none" if path is None else str(path))], None, "the checkpoint to resume from")


def _require_all_ranks(trainer: Any) -> None:
    """Raise if a callback saves after an exception on this rank, and not on all: the first collective would hang."""
    if trainer.state.status != "interrupted" or dist.get_world_size() == 1:
        return
    store, num_ranks = default_store(), dist.get_world_size()
    keys = [f"lightning_muon/interrupted/{trainer.global_step}/{rank}" for rank in range(num_ranks)]
    store.set(keys[dist.get_rank()], "")
    num_failed = num_ranks - len(missing_at(store, keys, _SECONDS_TO_FAIL_TOGETHER))
    if num_failed < num_ranks:
        raise RuntimeError(
            f"no checkpoint is saved after the exception: it needs the shards of all {num_ranks} ranks, "
            f"but only {num_failed} failed within {_SECONDS_TO_FAIL_TOGETHER:g} s; resume from an earlier one"
        )
