"""The strategy ``"parallel_muon"``, with nodes ``"flexdemo"``, written once for both Lightning packages."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.agreement import require_equal
from lightning_muon.comm.groups import axis_group
from lightning_muon.compat.lightning import (
    LightningPackage,
    apply_layer_sync,
    is_placeholder_optimizer,
    set_device_mesh,
    start_process_group,
)
from lightning_muon.config import from_arguments, takes_options
from lightning_muon.engine.conversion import (
    OptimizerChoice,
    ReplacedParameters,
    convert_optimizers,
    describe_optimizers,
    optimizer_warnings,
)
from lightning_muon.engine.forward_methods import register_steps, unshard_on_call
from lightning_muon.engine.gradient_rules import GradientRules
from lightning_muon.engine.mesh_sizes import Meshes, Size
from lightning_muon.engine.model_setup import (
    has_meta_tensors,
    materialize_user_sharded,
    materialize_whole,
    mixed_precision_policy,
    shard_units_from_meta,
)
from lightning_muon.engine.options import ELSEWHERE, ClipGroups, LossScaling, Options
from lightning_muon.grad_sync.token_count import TokenCount
from lightning_muon.integrations.lightning.callbacks import (
    before_weights_are_read,
    reads_gradients,
    reads_weights_between_steps,
    refuse_callbacks,
)
from lightning_muon.integrations.lightning.checkpoint_strategy import CheckpointStrategy
from lightning_muon.integrations.lightning.default_optimizer import (
    has_default_optimizer,
    provide_default_optimizer,
    remove_default_optimizer,
)
from lightning_muon.integrations.lightning.evaluation import avoid_inference_mode
from lightning_muon.integrations.lightning.precision_plugin import sharded_plugin
from lightning_muon.integrations.lightning.registry import STRATEGIES
from lightning_muon.integrations.lightning.running_strategy import RunningStrategy
from lightning_muon.monitor.watchdog import Watchdog
from lightning_muon.sharding.mode import BucketBytes, ModeOptions
from lightning_muon.sharding.modes import MODES, Sharding, make_mode
from lightning_muon.sharding.units import WrapPolicy, check_tensor_parallel


@takes_options(Options, ELSEWHERE)
class ParallelMuonMixin(CheckpointStrategy, RunningStrategy):
    """Trains any LightningModule with FSDP2 hybrid sharding and ParallelMuon.

    The base class beside it is the ``ModelParallelStrategy`` of one Lightning package: launcher, process group, and the
    writing of checkpoints are Lightning's. No ``configure_model`` is needed; one that shards parts of the model, or
    creates it on the meta device, is respected.

    Example::

        trainer = Trainer(accelerator="cpu", devices=4, strategy=ParallelMuonStrategy(replicate_size=2, shard_size=2))
        trainer.fit(model)
    """

    package: ClassVar[LightningPackage]

    def __init__(
        self,
        replicate_size: Size = Options.replicate_size,
        shard_size: Size = Options.shard_size,
        optimizer: OptimizerChoice = Options.optimizer,
        wrap_policy: WrapPolicy = Options.wrap_policy,
        reshard_after_forward: bool = Options.reshard_after_forward,
        *,
        sharding: Sharding = Options.sharding,
        context_size: int = Options.context_size,
        tensor_size: int = Options.tensor_size,
        loss_scaling: LossScaling = Options.loss_scaling,
        clip_groups: ClipGroups = Options.clip_groups,
        reshard_after_backward: bool = Options.reshard_after_backward,
        bucket_bytes: BucketBytes = Options.bucket_bytes,
        early_all_gather: bool = Options.early_all_gather,
        data_parallel_size: Size = Options.data_parallel_size,
        tensor_parallel_size: Size = Options.tensor_parallel_size,
        save_distributed_checkpoint: bool = Options.save_distributed_checkpoint,
        process_group_backend: str | None = Options.process_group_backend,
        timeout: timedelta = Options.timeout,
        max_silence: timedelta | None = Options.max_silence,
    ) -> None:
        self.options = from_arguments(Options, locals())
        self._meshes: Meshes | None = None
        self._first_callback: Any = None
        self._replaced: ReplacedParameters | None = None
        super().__init__(
            loss_scaling=loss_scaling,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def __repr__(self) -> str:
        """Also what a Trainer of the other package quotes when it refuses the strategy."""
        names = " and ".join(repr(name) for name in STRATEGIES)
        return (
            f"<{type(self).__name__} for Trainers of {self.package.name}; the names {names} find the right class for "
            "each package>"
        )

    @property
    def precision_plugin(self) -> Any:
        """Lightning's precision plugin, or its counterpart for shards."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        converted = None if plugin is None else sharded_plugin(plugin, self.package)
        super(ParallelMuonMixin, type(self)).precision_plugin.fset(self, converted)  # type: ignore[attr-defined]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Replicas and shards have samples of their own; context and tensor ranks share them."""
        if self._meshes is None:
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        return {"num_replicas": self._meshes.num_data_ranks, "rank": self._meshes.data_rank}

    def connect(self, model: Any) -> None:
        """Take the module of this run; without ``configure_optimizers`` it gets one."""
        super().connect(model)
        provide_default_optimizer(model, self.options.config, self.package)

    def setup_environment(self) -> None:
        """Start the process group and make the mesh. Collective over all ranks; every rank must call it."""
        if MODES[self.options.sharding].shards_weights:
            refuse_callbacks(self.lightning_module.trainer.callbacks, self.package)
        if self._loss_scaling == "tokens" and not self.lightning_module.automatic_optimization:
            raise ValueError(
                "loss_scaling='tokens' needs automatic optimization, where it is known which micro-batches make a "
                "step; with manual optimization divide the loss by the number of tokens yourself"
            )
        layout = {"num_nodes": self.num_nodes, "num_processes": self.num_processes}
        # An error here is the same on all ranks, and comes before any communication.
        self.options.mesh_sizes.resolve(**layout)
        start_process_group(self)
        if self._meshes is None:  # A second run of the Trainer keeps its process groups.
            self._meshes = self.options.mesh_sizes.make(self.root_device.type, **layout)
        set_device_mesh(self, self._meshes.user)

    def setup(self, trainer: Any) -> None:
        """Shard the model, load weights, create optimizers. Collective over all ranks; every rank must call it."""
        self.accelerator.setup(trainer)
        avoid_inference_mode(trainer)
        module: Any = self.lightning_module
        apply_layer_sync(self, module)
        self._replaced = ReplacedParameters(module)
        self.model = self.precision_plugin.convert_module(module)
        self._mode = make_mode(self.options.sharding, self._mesh(), self._options_of(trainer))
        self._shard(module)
        self._replaced.close(module)
        self.model_to_device()
        self.barrier()
        self.load_pending_weights()
        self._mode.watch(module)
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
            self._prepare_training(trainer)
        assert self._mode.call_log is not None
        self._watchdog = Watchdog(self._mode.call_log, silence=self.options.max_silence)
        self._watchdog.start()
        self.setup_precision_plugin()

    def _options_of(self, trainer: Any) -> ModeOptions:
        """The user's options, and what follows from the run."""
        module: Any = self.lightning_module
        return replace(
            self.options.mode_options,
            mp_policy=mixed_precision_policy(self.precision_plugin.precision, module),
            # A step that runs several backward passes needs each child to gather its own weights anew.
            shard_root=module.automatic_optimization,
            wait_for_parameters=(
                self.options.config.overlap in ("step", "off")
                or not module.automatic_optimization
                or reads_weights_between_steps(trainer, self.package)
            ),
        )

    def _shard(self, module: Any) -> None:
        assert self._mode is not None and self._meshes is not None
        if self._meshes.tensor is not None:
            check_tensor_parallel(module, self._meshes.tensor)
        if has_meta_tensors(module):
            warn = self._rank_zero().rank_zero_warn
            if self._mode.shards_weights:
                materialize_user_sharded(module, self.root_device, self.package)
                shard_units_from_meta(module, self._mesh(), self._mode.options, device=self.root_device, warn=warn)
            else:
                materialize_whole(module, self.root_device, warn)
        self._mode.prepare(module)
        register_steps(module)
        unshard_on_call(module)

    def setup_optimizers(self, trainer: Any) -> None:
        """Call ``configure_optimizers`` and decide what becomes of its result."""
        super().setup_optimizers(trainer)
        self._node_weights.forget()
        module: Any = self.lightning_module
        for optimizer in self.optimizers:
            self._replaced.rebind(optimizer, module)  # type: ignore[union-attr]
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        conversions = convert_optimizers(
            self.optimizers,
            schedulers,
            module,
            choice=self.options.optimizer,
            is_placeholder=partial(is_placeholder_optimizer, self.package),
        )
        kinds = [(f"optimizer {index}", conversion.summary) for index, conversion in enumerate(conversions)]
        require_equal(kinds, None, "what configure_optimizers returned")
        self.optimizers = [conversion.optimizer for conversion in conversions]
        assert self._mode is not None
        self._mode.attach(module, self.optimizers)
        self._rank_zero().rank_zero_info(describe_optimizers(conversions))
        is_default = has_default_optimizer(module)
        for message in optimizer_warnings(conversions, self.options.optimizer, is_default=is_default):
            self._rank_zero().rank_zero_warn(message)

    def _prepare_training(self, trainer: Any) -> None:
        """Make what a training has beside its optimizers. Collective over all ranks; every rank must call it."""
        assert self._mode is not None
        module: Any = self.lightning_module
        self._rules = GradientRules(
            module,
            self._mode,
            clip_groups=self.options.clip_groups,
            max_skipped_steps=self.options.config.max_skipped_steps,
        )
        self.precision_plugin.rules = self._rules
        if self._loss_scaling == "tokens":
            mesh = self._mesh()
            self._tokens = TokenCount(axis_group(mesh, tuple(range(mesh.ndim))))
        if not self._mode.parameters_arrive_late:
            return
        self._first_callback = before_weights_are_read(self.package, self.finish_parameters)
        trainer.callbacks.insert(0, self._first_callback)
        if readers := reads_gradients(trainer, self.package):
            self._rank_zero().rank_zero_warn(
                f"{', '.join(readers)}: with sharding={self.options.sharding!r} no rank has whole gradients, so "
                "parameter.grad is None there, and changing it has no effect; use sharding='ddp' or 'fsdp' if the hook "
                "needs gradients"
            )

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks why they will wait in vain; local."""
        self._sigterm.ignore()
        if self._watchdog is not None:
            self._watchdog.failed(exception)
        self._show_own_weights()
        super().on_exception(exception)

    def teardown(self) -> None:
        """End the run; the model stays sharded."""
        remove_default_optimizer(self.lightning_module)
        self._show_own_weights()
        if self._watchdog is not None:
            self._watchdog.close()
        if self._first_callback in self.lightning_module.trainer.callbacks:
            self.lightning_module.trainer.callbacks.remove(self._first_callback)
        self._close_mode()
        self._rules = self._tokens = self._watchdog = self._first_callback = self.precision_plugin.rules = None
        super().teardown()

    def _close_mode(self) -> None:
        mode, self._mode = self._mode, None
        if mode is None:
            return
        try:
            mode.close()
        except RuntimeError as error:
            self._rank_zero().rank_zero_warn(
                f"The weights of the last step have not arrived from all ranks ({error}); do not save this model, load "
                "a checkpoint"
            )

    def _mesh(self) -> DeviceMesh:
        assert self._meshes is not None, "setup_environment comes first"
        mesh = self._meshes.nodes if self.options.has_nodes else self._meshes.data
        assert mesh is not None, "check_decoupled_nodes refuses meshes without nodes"
        return mesh

    def _rank_zero(self) -> Any:
        return self.package.module("utilities.rank_zero")
