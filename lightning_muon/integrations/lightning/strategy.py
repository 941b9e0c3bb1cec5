"""The strategy ``"parallel_muon"``, written once for both Lightning packages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.agreement import require_equal
from lightning_muon.compat.lightning import (
    LightningPackage,
    apply_layer_sync,
    set_device_mesh,
    start_process_group,
)
from lightning_muon.config import MuonConfig
from lightning_muon.integrations.lightning.callbacks import refuse_callbacks
from lightning_muon.integrations.lightning.checkpoint_strategy import CheckpointStrategy
from lightning_muon.integrations.lightning.evaluation import avoid_inference_mode
from lightning_muon.integrations.lightning.materialize import (
    has_meta_tensors,
    materialize_user_sharded,
    shard_units_from_meta,
)
from lightning_muon.integrations.lightning.mesh import MeshSizes, Size
from lightning_muon.integrations.lightning.optimizers import (
    OptimizerChoice,
    ReplacedParameters,
    choose_optimizers,
    describe_optimizers,
    optimizer_warnings,
    provide_default_optimizer,
    remove_default_optimizer,
)
from lightning_muon.integrations.lightning.outside_steps import gather_root_outside_steps
from lightning_muon.integrations.lightning.precision import mixed_precision_policy, sharded_plugin
from lightning_muon.integrations.lightning.running_strategy import RunningStrategy
from lightning_muon.integrations.lightning.steps import register_steps
from lightning_muon.sharding.fsdp import shard_model
from lightning_muon.sharding.gradients import GradientAgreement
from lightning_muon.sharding.runtime import initialize_roots
from lightning_muon.sharding.wrap import WrapPolicy

_TIMEOUT = timedelta(seconds=1800)  # That of torch.distributed, and of Lightning's other strategies.


class ParallelMuonMixin(CheckpointStrategy, RunningStrategy):
    """Trains any LightningModule with FSDP2 hybrid sharding and ParallelMuon.

    The base class beside it is the ``ModelParallelStrategy`` of one Lightning package: launcher, process group, and the
    writing of checkpoints are Lightning's. No ``configure_model`` is needed; one that shards parts of the model, or
    creates it on the meta device, is respected.

    Example::

        trainer = Trainer(accelerator="cpu", devices=4, strategy=ParallelMuonStrategy(replicate_size=2, shard_size=2))
        trainer.fit(model)

    Args:
        replicate_size: Replicas of the model; see :class:`~lightning_muon.integrations.lightning.mesh.MeshSizes`.
        shard_size: Ranks that share one replica.
        optimizer: What to make of ``configure_optimizers``. ``"auto"``: AdamW and Adam become ParallelMuon with the
            same learning rate. ``"keep"``: nothing is replaced. A config: as ``"auto"``, with its momentum, patterns
            and so on; without ``configure_optimizers`` it is the optimizer.
        wrap_policy: Which modules are FSDP2 units; see :func:`lightning_muon.sharding.wrap.find_units`.
        reshard_after_forward: Free the whole weights of a unit between forward and backward.
        early_all_gather: On CUDA the all-gathers of the next forward wait for the optimizer step only, not for what is
            queued after it. Not together with callbacks that change weights after a step.
        data_parallel_size: Lightning's name for sharding over all ranks without replicas.
        tensor_parallel_size: Must be 1.
        save_distributed_checkpoint: A directory with the shards of each rank, or one file in the usual format.
        process_group_backend: ``None``: gloo for CPUs, NCCL for CUDA.
        timeout: Of collectives.
    """

    package: ClassVar[LightningPackage]

    def __init__(
        self,
        replicate_size: Size = "auto",
        shard_size: Size = "auto",
        optimizer: OptimizerChoice = "auto",
        wrap_policy: WrapPolicy = "auto",
        reshard_after_forward: bool = True,
        *,
        early_all_gather: bool = False,
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = _TIMEOUT,
    ) -> None:
        self._mesh_sizes = MeshSizes(
            replicate_size=replicate_size,
            shard_size=shard_size,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
        )
        if optimizer not in ("auto", "keep") and not isinstance(optimizer, MuonConfig):
            raise ValueError(f"optimizer must be 'auto', 'keep' or a MuonConfig, got {optimizer!r}")
        self._optimizer_choice: OptimizerChoice = optimizer
        self._wrap_policy = wrap_policy
        self._reshard_after_forward = reshard_after_forward
        self._meshes: tuple[DeviceMesh, DeviceMesh] | None = None
        self._replaced: ReplacedParameters | None = None
        super().__init__(
            early_all_gather=early_all_gather,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def __repr__(self) -> str:
        """Also what a Trainer of the other package quotes when it refuses the strategy."""
        return (
            f"<{type(self).__name__} for Trainers of {self.package.name}; strategy='parallel_muon' finds the right "
            "class for each package>"
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
        """Every rank is a data-parallel rank, replicas and shards alike."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def connect(self, model: Any) -> None:
        """Take the module of this run; without ``configure_optimizers`` it gets one."""
        super().connect(model)
        choice = self._optimizer_choice
        provide_default_optimizer(model, choice if isinstance(choice, MuonConfig) else MuonConfig(), self.package)

    def setup_environment(self) -> None:
        """Start the process group and make the mesh. Collective over all ranks; every rank must call it."""
        refuse_callbacks(self.lightning_module.trainer.callbacks, self.package)
        layout = {"num_nodes": self.num_nodes, "num_processes": self.num_processes}
        # An error here is the same on all ranks, and comes before any communication.
        self._mesh_sizes.resolve(**layout)
        start_process_group(self)
        if self._meshes is None:  # A second run of the Trainer keeps its process groups.
            self._meshes = self._mesh_sizes.make(self.root_device.type, **layout)
        set_device_mesh(self, self._meshes[0])

    def setup(self, trainer: Any) -> None:
        """Shard the model, load weights, create optimizers. Collective over all ranks; every rank must call it."""
        self.accelerator.setup(trainer)
        avoid_inference_mode(trainer)
        module: Any = self.lightning_module
        apply_layer_sync(self, module)
        self._replaced = ReplacedParameters(module)
        self.model = self.precision_plugin.convert_module(module)
        self._shard(module)
        self._replaced.close(module)
        self.model_to_device()
        self.barrier()
        self.load_pending_weights()
        if trainer.state.fn == "fit":
            self._agreement = GradientAgreement(module, self._mesh())
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self, module: Any) -> None:
        options: dict[str, Any] = {
            "mp_policy": mixed_precision_policy(self.precision_plugin, module),
            "reshard_after_forward": self._reshard_after_forward,
        }
        # A step that runs several backward passes needs each child to gather its own weights anew.
        layout: dict[str, Any] = {"wrap_policy": self._wrap_policy, "shard_root": module.automatic_optimization}
        if has_meta_tensors(module):
            materialize_user_sharded(module, self.root_device, self.package)
            warn = self._rank_zero().rank_zero_warn
            shard_units_from_meta(module, self._mesh(), device=self.root_device, warn=warn, **layout, **options)
        shard_model(module, self._mesh(), **layout, **options)
        register_steps(module)
        initialize_roots(module)
        gather_root_outside_steps(module)

    def setup_optimizers(self, trainer: Any) -> None:
        """Call ``configure_optimizers`` and decide what becomes of its result."""
        super().setup_optimizers(trainer)
        module: Any = self.lightning_module
        for optimizer in self.optimizers:
            self._replaced.rebind(optimizer, module)  # type: ignore[union-attr]
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        choice = self._optimizer_choice
        adoptions = choose_optimizers(self.optimizers, schedulers, module, choice=choice, package=self.package)
        kinds = [(f"optimizer {index}", adoption.summary) for index, adoption in enumerate(adoptions)]
        require_equal(kinds, None, "what configure_optimizers returned")
        self.optimizers = [adoption.optimizer for adoption in adoptions]
        self._rank_zero().rank_zero_info(describe_optimizers(adoptions))
        for message in optimizer_warnings(adoptions, module, choice):
            self._rank_zero().rank_zero_warn(message)

    def teardown(self) -> None:
        """End the run; the model stays sharded."""
        remove_default_optimizer(self.lightning_module)
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None
        super().teardown()

    def _mesh(self) -> DeviceMesh:
        assert self._meshes is not None, "setup_environment comes first"
        return self._meshes[1]

    def _rank_zero(self) -> Any:
        return self.package.module("utilities.rank_zero")
