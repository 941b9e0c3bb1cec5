"""A language of 50 words on two processes: python FILE"""

import lightning as L
import torch
import torch.nn.functional as F
from deepspeed.ops.adam import FusedAdam
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(50, 16), Block(), Block(), nn.Linear(16, 50))

    def training_step(self, batch):
        (tokens,) = batch
        return F.cross_entropy(self.layers(tokens), (tokens + 1) % 50)

    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=1e-2, weight_decay=0.1)


def main(**trainer_options):
    L.seed_everything(0)
    model = Model()
    trainer = L.Trainer(devices=2, max_epochs=2, strategy="deepspeed_stage_2", **trainer_options)
    trainer.fit(model, DataLoader(TensorDataset(torch.arange(48)), batch_size=4))
    return model


if __name__ == "__main__":
    main()
