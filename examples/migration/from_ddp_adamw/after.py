"""A language of 50 words on two processes: torchrun --nproc_per_node 2 FILE"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_muon import ParallelMuon
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 50))
    model = fully_shard(model)
    optimizer = ParallelMuon(model, lr=1e-2, muon_lr_factor=3.0, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        tokens = torch.randint(50, (8,), generator=generator)
        F.cross_entropy(model(tokens), (tokens + 1) % 50).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
