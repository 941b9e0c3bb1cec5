"""Plain PyTorch: torchrun --nproc_per_node 4 examples/plain_loop.py"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_muon import ParallelMuon


def train(model, batches):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("shard",))
    fully_shard(model, mesh=mesh)
    optimizer = ParallelMuon(model, lr=1e-3, muon_lr_factor=3.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
    for tokens in batches:
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return optimizer


if __name__ == "__main__":
    torch.distributed.init_process_group()
    torch.manual_seed(0)
    layers = nn.Embedding(1000, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Linear(64, 1000)
    tokens = torch.randint(1000, (10, torch.distributed.get_world_size(), 32))
    trained = train(nn.Sequential(*layers), batches=tokens[:, torch.distributed.get_rank()])
    if torch.distributed.get_rank() == 0:
        print(trained.summary())
    torch.distributed.destroy_process_group()
