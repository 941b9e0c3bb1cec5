"""The loop of a row in each framework, as its documentation shows it; every rank of the pool's call runs it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import lightning_muon
from lightning_muon import FlexDeMo, ModeOptions, ParallelMuon, forward_backward, full_state_dict, make_mode
from lightning_muon.engine.mesh_sizes import Meshes, MeshSizes
from lightning_muon.integrations import registry
from lightning_muon.params.layout import local_tensor
from tests.integration.integrations.accelerate.loop import accelerator_on_cpu
from tests.integration.integrations.transformers import runs
from tests.integration.training import load, trainer
from tests.matrix.row import BETAS, EPS, EXACT, LR, ROWS, WEIGHT_DECAY, Batch, Found, Row
from tests.support.tensors import weights_of, wholes

# Of an optimizer that the program makes itself.
_OWN: dict[str, Any] = {"lr": LR, "weight_decay": WEIGHT_DECAY, "betas": BETAS, "adamw_eps": EPS, **EXACT}


@dataclass(frozen=True)
class Task:
    """A row, where it is saved after ``saved_at`` steps, and whether it goes on from there."""

    row: Row
    directory: str
    resume: bool = False

    @property
    def path(self) -> str:
        return f"{self.directory}/saved"

    @property
    def steps(self) -> range:
        return range(self.row.saved_at if self.resume else 0, self.row.steps)

    def saves(self, step: int) -> bool:
        return bool(self.row.saved_at) and not self.resume and step + 1 == self.row.saved_at

    @property
    def seed(self) -> int:
        """Ranks begin with different weights: those of the first one, or of the checkpoint, count."""
        return dist.get_rank() + 10 * self.resume


def train(task: Task) -> Found:
    """Whole weights and the losses of this rank."""
    weights, losses = DRIVERS[task.row.framework](task.row, task)
    return {name.removeprefix("net."): value.detach().clone() for name, value in weights.items()}, losses


def _scheduler(row: Row, optimizer: Any, *, per_step: int = 1) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: row.rate(count // per_step))


def _fabric(row: Row, task: Task, package: str = "lightning.fabric", *, apart: bool = False) -> Found:
    os.environ["TORCHELASTIC_RUN_ID"] = "pool"
    strategy = registry.strategy_class(package)(**({"optimizer": row.config} | dict(row.options)))
    make = __import__(package, fromlist=["Fabric"]).Fabric
    fabric = make(accelerator="cpu", devices=row.ranks, strategy=strategy, precision=row.precision)
    fabric.launch()
    is_pipeline = "pipeline_size" in row.options
    net = row.make_model(0 if is_pipeline else task.seed)  # Each stage of a pipeline has the weights of its own parts.
    given: Any = row.make_optimizer(net)
    scheduler: Any = _scheduler(row, given) if apart else None
    if apart:
        model, optimizer = fabric.setup_module(net), fabric.setup_optimizers(given)
    else:
        model, optimizer = fabric.setup(net, given)
    scheduler, losses = scheduler or _scheduler(row, optimizer), list[float]()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if task.resume:
        fabric.load(task.path, state)
    rank = fabric.strategy.distributed_sampler_kwargs["rank"]
    for step in task.steps:
        optimizer.zero_grad()
        losses.append(0.0)
        for index in range(row.accumulate):
            batch = row.batch(step, index, rank)
            with fabric.no_backward_sync(model, enabled=index < row.accumulate - 1):
                if is_pipeline:
                    loss = forward_backward(model, batch)
                else:
                    if row.has_tokens:
                        fabric.strategy.report_tokens(row.num_tokens(batch))
                    loss = row.loss(model, batch) / (1 if row.has_tokens else row.accumulate)
                    fabric.backward(loss)
            # A pipeline has divided the sum of its rank.
            losses[-1] += loss.item() * (row.num_tokens(batch) if is_pipeline and row.has_tokens else 1)
        if row.max_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=row.max_norm)
        if row.max_value is not None:
            fabric.clip_gradients(model, optimizer, clip_val=row.max_value)
        optimizer.step()
        scheduler.step()
        if task.saves(step):
            fabric.save(task.path, state)
    fabric.strategy.finish_saving()
    weights = full_state_dict(model)
    fabric.strategy.teardown()
    return weights, losses


def _lightning(row: Row, task: Task, package: str = "lightning.pytorch") -> Found:
    pl, losses = load(package), list[float]()
    sizes, is_pipeline = row.options, "pipeline_size" in row.options

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = row.make_model(0 if is_pipeline else task.seed)

        def configure_model(self) -> None:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in self.net.blocks if "tensor_size" in sizes else ():
                parallelize_module(block, self.device_mesh["tensor"], plan)

        def training_step(self, batch: Batch, index: int) -> Tensor:
            if "context_size" in sizes:
                parts = lightning_muon.split_sequence(tuple(batch.values()), self.device_mesh["context"])
                batch = dict(zip(batch, parts, strict=True))
            if row.has_tokens:
                self.trainer.strategy.report_tokens(row.num_tokens(batch))
            loss = row.loss(self.net, batch)
            # With tokens the loss of a part of the sequences is a part of the sum.
            losses.append(loss.item() * (sizes.get("context_size", 1) if row.has_tokens else 1 / row.accumulate))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = row.make_optimizer(self)
            return [optimizer], [{"scheduler": _scheduler(row, optimizer), "interval": "step"}]

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if (index + 1) % row.accumulate == 0 and task.saves(trainer.global_step - 1):
                trainer.save_checkpoint(task.path)

    strategy = registry.strategy_class(package)(**({"optimizer": row.config} | dict(row.options)))
    clipping: dict[str, Any] = {"gradient_clip_val": row.max_norm or row.max_value}
    if row.max_value is not None:
        clipping["gradient_clip_algorithm"] = "value"
    module = Module()
    for name in ("pipeline_parts", "pipeline_step", "pipeline_loss") if is_pipeline else ():
        setattr(module, name, getattr(module.net, name))
    fitter = trainer(
        pl, strategy=strategy, precision=row.precision, max_epochs=1, max_steps=row.steps, callbacks=[Save()],
        accumulate_grad_batches=row.accumulate, use_distributed_sampler=False, **clipping,
    )  # fmt: skip
    rank = dist.get_rank() // (row.ranks // row.num_data_ranks)
    if is_pipeline:
        rank = dist.get_rank() % row.num_data_ranks
    batches = [row.batch(step, index, rank) for step in range(row.steps) for index in range(row.accumulate)]
    samples: Any = [{key: each[key][i] for key in each} for each in batches for i in range(len(each["labels"]))]
    loader = DataLoader(samples, batch_size=ROWS // row.num_data_ranks)
    fitter.fit(module, loader, ckpt_path=task.path if task.resume else None, weights_only=False)
    windows = range(0, len(losses), row.accumulate)
    return full_state_dict(module), [sum(losses[first : first + row.accumulate]) for first in windows]


def _accelerate(
    row: Row, task: Task, *, is_fsdp: bool = True, compiles: bool = False, apart: bool = False, by_torch: bool = False
) -> Found:
    """``by_torch``: the last micro-batch calls ``loss.backward()`` itself."""
    options = {"optimizer": row.config} | dict(row.options)
    variables = {"ACCELERATE_DYNAMO_BACKEND": "EAGER"} if compiles else {}
    arguments: dict[str, Any] = {"is_fsdp": is_fsdp, "micro_batches": row.accumulate, "variables": variables}
    arguments["mixed_precision"] = "bf16" if row.precision == "bf16-mixed" else "no"
    with accelerator_on_cpu(**arguments, **options) as accelerator:
        net = row.make_model(task.seed).to(torch.bfloat16 if row.precision == "bf16-true" else torch.float32)
        optimizer: Any = row.make_optimizer(net)
        make: Any = partial(_scheduler, row, per_step=row.ranks)  # Accelerate steps it once for each process.
        if apart:
            model, optimizer = accelerator.prepare_model(net), accelerator.prepare_optimizer(optimizer)
            scheduler = accelerator.prepare(make(optimizer))
        else:
            model, optimizer, scheduler = accelerator.prepare(net, optimizer, make(optimizer))
        assert hasattr(model, "_orig_mod") == compiles
        if task.resume:
            accelerator.load_state(task.path)
        losses = list[float]()
        for step in task.steps:
            losses.append(0.0)
            for index in range(row.accumulate):
                batch = row.batch(step, index, accelerator.process_index)
                with accelerator.accumulate(model):
                    if row.has_tokens:
                        accelerator.report_tokens(row.num_tokens(batch))
                    loss = row.loss(model, batch)
                    losses[-1] += loss.item() / (1 if row.has_tokens else row.accumulate)
                    if by_torch and index == row.accumulate - 1:
                        (loss / row.accumulate).backward()
                    else:
                        accelerator.backward(loss)
                    if row.max_norm is not None:
                        norm = accelerator.clip_grad_norm_(model.parameters(), row.max_norm)
                        assert (norm > 0) == accelerator.sync_gradients
                    if row.max_value is not None:
                        accelerator.clip_grad_value_(model.parameters(), row.max_value)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            if task.saves(step):
                accelerator.save_state(task.path)
        return full_state_dict(accelerator.unwrap_model(model)), losses


def _transformers(row: Row, task: Task, parallel: str, *, is_launched: bool = False, **variables: str) -> Found:
    """A Trainer with ParallelMuon, or an unchanged one that ``lightning-muon launch`` starts."""
    batches = [row.batch(step, index) for step in range(row.steps) for index in range(row.accumulate)]
    samples = [{key: each[key][i] for key in each} for each in batches for i in range(ROWS)]
    ours = lightning_muon.hf.optimizer(dedupe="always", **_OWN)
    options = {"optimizer": EXACT | dict(row.optimizer)} | dict(row.options)
    launched = runs.launched(task.directory, options) if is_launched else nullcontext()
    with runs.accelerator_of(parallel, **variables), launched:
        run = runs.trainer(
            f"{task.directory}/out",
            row.make_model(task.seed if is_launched and not task.resume else 10 * task.resume),
            optimizer_cls_and_kwargs=None if is_launched else ours,
            global_batch=ROWS * row.accumulate,
            accumulate=row.accumulate,
            data=samples,
            learning_rate=LR,
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPS,
            max_steps=row.steps,
            max_grad_norm=row.max_norm or 0.0,
            lr_scheduler_type="linear" if row.has_rates else "constant",
            bf16=row.precision == "bf16-mixed",
            save_strategy="steps" if row.saved_at and not task.resume else "no",
            save_steps=row.saved_at or 500,
        )
        run.train(resume_from_checkpoint=f"{task.directory}/out/checkpoint-{row.saved_at}" if task.resume else None)
        weights = weights_of(run.accelerator.unwrap_model(run.model))
        if is_launched:
            run.accelerator.free_memory()
        return weights, []


def _meshes(row: Row) -> Meshes:
    sizes = {key: value for key, value in row.options.items() if key.endswith("_size")}
    return MeshSizes(**sizes).make("cpu", num_nodes=1, num_processes=row.ranks)


def _plain(row: Row, task: Task) -> Found:
    """A loop of its own with a sharding mode and a ParallelMuon."""
    others = {key: value for key, value in row.options.items() if key != "sharding" and not key.endswith("_size")}
    net = row.make_model(task.seed).to(torch.bfloat16 if row.precision == "bf16-true" else row.dtype)
    mode = make_mode(row.options.get("sharding", "fsdp"), _meshes(row).data, ModeOptions(**others))
    mode.prepare(net)
    optimizer = ParallelMuon(net, **(_OWN | dict(row.optimizer)))
    mode.attach(net, [optimizer])
    graphs = list[None]()

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(None)
        return graph

    torch.compiler.reset()
    for module in {"units": net.blocks, "model": [net]}.get(row.compiles, ()):
        module.compile(backend=count)
    losses = list[float]()
    for step in task.steps:
        optimizer.zero_grad()
        losses.append(0.0)
        for index in range(row.accumulate):
            with nullcontext() if index == row.accumulate - 1 else mode.no_sync():
                loss = row.loss(net, row.batch(step, index, dist.get_rank())) / row.accumulate
                loss.backward()
            losses[-1] += loss.item()
        mode.finish_gradients()
        if row.max_norm is not None:
            mode.clip_grad_norm_(optimizer, row.max_norm)
        optimizer.step()
    mode.finish_parameters()
    assert bool(graphs) == bool(row.compiles)
    return full_state_dict(net) if row.has_mains else weights_of(net), losses


def _mesh(row: Row) -> DeviceMesh:
    replicas = row.options.get("replicate_size", 1)
    return init_device_mesh("cpu", (replicas, row.ranks // replicas), mesh_dim_names=("replicate", "shard"))


def _fully_shard(row: Row, task: Task) -> Found:
    """A loop of its own with ``fully_shard``, one of our optimizers, and torch's checkpoints."""
    mesh, net = _mesh(row), row.make_model(10 * task.resume)
    for unit in (*net.blocks, net):
        fully_shard(unit, mesh=mesh["shard"] if row.has_nodes else mesh)
    arguments = {**_OWN, **dict(row.optimizer)}  # type: ignore[arg-type]
    optimizer = FlexDeMo(net, mesh=mesh, **arguments) if row.has_nodes else ParallelMuon(net, **arguments)
    losses = list[float]()

    def state() -> dict[str, Any]:
        return {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}

    if task.resume:
        saved = state()
        dcp.load(saved, checkpoint_id=task.path)
        set_model_state_dict(net, saved["model"])
        set_optimizer_state_dict(net, optimizer, saved["optimizer"])
    for step in task.steps:
        optimizer.zero_grad()
        losses.append(0.0)
        for index in range(row.accumulate):
            net.set_requires_gradient_sync(index == row.accumulate - 1)
            net.set_is_last_backward(index == row.accumulate - 1)
            loss = row.loss(net, row.batch(step, index, dist.get_rank())) / row.accumulate
            loss.backward()
            losses[-1] += loss.item()
        if row.max_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), row.max_norm)
        optimizer.step()
        if task.saves(step):
            dcp.save(state(), checkpoint_id=task.path)
    net.reshard()
    return weights_of(net), losses


def _divided_twice(tensor: Tensor, meshes: Meshes, dim: int) -> Tensor:
    """As torch does it: by tensor parallelism first, then by FSDP2."""
    assert meshes.tensor is not None
    holder = nn.Module()
    holder.weight = nn.Parameter(distribute_tensor(tensor.clone(), meshes.tensor, [Shard(dim)], src_data_rank=None))
    fully_shard(holder, mesh=meshes.data)
    return holder.weight.detach()


def _tensors(row: Row, task: Task) -> Found:
    """An optimizer of ours on tensors that were placed by hand: sharded along a dimension, replicated or plain."""
    dim, mesh, meshes = row.options.get("shard_dim", 0), _mesh(row), _meshes(row)
    last = Shard(dim) if isinstance(dim, int) else Replicate()
    of_tensors = mesh["shard"] if row.has_nodes else mesh
    placements: list[Any] = [*[Replicate()] * (of_tensors.ndim - 1), last]

    def place(tensor: Tensor) -> Tensor:
        if meshes.tensor is not None:
            return _divided_twice(tensor, meshes, row.options["shard_dim"])
        if dim == "plain" and tensor.ndim == 4:
            return tensor.clone(memory_format=torch.channels_last)
        if dim == "plain" or (isinstance(dim, int) and tensor.ndim <= dim):
            return tensor.clone()
        return distribute_tensor(tensor.clone(), of_tensors, placements, src_data_rank=None)

    whole = row.make_model()
    parameters = {name: nn.Parameter(place(each.detach())) for name, each in whole.named_parameters()}
    arguments = {**_OWN, **dict(row.optimizer)}  # type: ignore[arg-type]
    kind: Any = FlexDeMo if row.has_nodes else ParallelMuon
    optimizer = kind(parameters.items(), mesh=mesh if row.has_nodes or dim == "plain" else None, **arguments)
    node = mesh.get_local_rank("replicate") if row.has_nodes else 0
    lacking = () if row.has_nodes else row.missing.get(dist.get_rank(), ())
    for step in task.steps:
        gradients = row.gradients(step, node)
        if row.is_disturbed and step == 1:
            optimizer.add_param_group({"params": [("new", nn.Parameter(torch.zeros(4)))]})
        if row.is_disturbed and step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
        for is_broken in (True, False) if row.is_disturbed and step else (False,):
            for name, parameter in parameters.items():
                parameter.grad = place(gradients[name]) if name in gradients and name not in lacking else None
            if is_broken and dist.get_rank() == 1:
                local_tensor(parameters["tall"].grad)[-1] = torch.nan  # type: ignore[arg-type]
            optimizer.step()
    context: Any = optimizer.common_weights() if hasattr(optimizer, "common_weights") else nullcontext()
    with context:
        found = wholes(parameters)
    if hasattr(optimizer, "num_exchanges"):  # Of all nodes: not multiplied by lr, so that an error shows in them.
        states = {name: optimizer.state[parameter] for name, parameter in parameters.items()}
        found |= wholes(
            {f"{name}.residual": state["residual"] for name, state in states.items() if "residual" in state}
        )
    return found, []


DRIVERS: dict[str, Callable[[Row, Task], Found]] = {
    "plain": _plain,
    "fully_shard": _fully_shard,
    "tensors": _tensors,
    "fabric": _fabric,
    "fabric, set up apart": partial(_fabric, apart=True),
    "lightning_fabric": partial(_fabric, package="lightning_fabric"),
    "lightning": _lightning,
    "pytorch_lightning": partial(_lightning, package="pytorch_lightning"),
    "accelerate": _accelerate,
    "accelerate ddp": partial(_accelerate, is_fsdp=False),
    "accelerate ddp, prepared apart": partial(_accelerate, is_fsdp=False, apart=True),
    "accelerate compiled": partial(_accelerate, compiles=True),
    "accelerate by torch": partial(_accelerate, by_torch=True),
    "accelerate ddp by torch": partial(_accelerate, is_fsdp=False, by_torch=True),
    **{f"transformers {kind}": partial(_transformers, parallel=kind) for kind in ("none", "ddp", "fsdp", "hsdp")},
    "transformers fsdp, one file": partial(_transformers, parallel="fsdp", FSDP_STATE_DICT_TYPE="FULL_STATE_DICT"),
    **{
        f"transformers launched {kind}": partial(_transformers, parallel=kind, is_launched=True)
        for kind in ("none", "ddp", "hsdp")
    },
}
