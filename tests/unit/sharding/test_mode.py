import torch
from torch import nn

from lightning_muon import ParallelMuon
from lightning_muon.params.layout import TensorLayout
from lightning_muon.sharding.mode import Attachable, attach_optimizers


def test_only_optimizers_that_can_be_attached_are() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    ours, theirs = ParallelMuon(net[0].parameters()), torch.optim.SGD(net[1].parameters(), momentum=0.9)
    assert isinstance(ours, Attachable) and not isinstance(theirs, Attachable)
    attach_optimizers(net, [ours, theirs], TensorLayout())
    assert [route.name for route in ours.routes] == ["0.weight", "0.bias"]
    assert len(ours.state) == 2 and not theirs.state
