"""A language of 50 words on two processes: torchrun --nproc_per_node 2 FILE"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 50)))
    rest = [parameter for name, parameter in model.named_parameters() if name != "1.weight"]
    muon = torch.optim.Muon([model[1].weight], lr=1e-2, weight_decay=0.1)
    optimizers = [muon, torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1)]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        tokens = torch.randint(50, (8,), generator=generator)
        F.cross_entropy(model(tokens), (tokens + 1) % 50).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
