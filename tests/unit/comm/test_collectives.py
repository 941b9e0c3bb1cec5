"""Numbers on their way to the host: their values, whatever their dtype. CUDA: tests/unit/optim/test_on_fake_cuda.py."""

import torch

from lightning_muon.comm.collectives import start_reading


def test_every_dtype_comes_back_as_it_was_when_asked_for() -> None:
    large = 2**62 + 1
    tensors = [
        torch.tensor([1, 0], dtype=torch.int32),
        torch.tensor(large),
        torch.tensor([True, False, True]),
        torch.tensor([[0.5], [float("inf")]], dtype=torch.float64),
        torch.empty(0),
    ]
    read = start_reading(tensors)
    for tensor in tensors:
        tensor.zero_()

    assert read() == [[1, 0], [large], [True, False, True], [0.5, float("inf")], []]
    assert start_reading([])() == []
