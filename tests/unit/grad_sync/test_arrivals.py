import gc
import weakref

import torch
from torch import Tensor, nn

from lightning_muon.grad_sync.reducer import Arrivals, watch_gradients


class _Owner:
    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.seen: list[tuple[int, ...]] = []
        self.close = watch_gradients(self, net.parameters(), _Owner.arrived)

    def arrived(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.seen.append(tuple(parameter.shape))


def _backward(net: nn.Module) -> None:
    net(torch.ones(1, 2)).sum().backward()


def test_the_number_of_calls_is_learnt_from_the_step_before() -> None:
    arrivals = Arrivals()
    assert [arrivals.add(), arrivals.add()] == [True, False]
    arrivals.begin_step()
    assert [arrivals.add(), arrivals.add()] == [False, True]
    arrivals.begin_step()
    arrivals.begin_step()  # A step without any backward pass.
    assert arrivals.add()


def test_gradients_are_told_of_until_the_hooks_go() -> None:
    net = nn.Linear(2, 3)
    owner = _Owner(net)
    _backward(net)
    assert sorted(owner.seen) == [(3,), (3, 2)]
    owner.close()
    _backward(net)
    assert len(owner.seen) == 2


def test_a_frozen_parameter_stays_frozen_and_is_watched_once_it_is_not() -> None:
    net = nn.Linear(2, 3)
    net.bias.requires_grad_(False)
    owner = _Owner(net)
    _backward(net)
    assert owner.seen == [(3, 2)] and not net.bias.requires_grad
    net.bias.requires_grad_(True)
    _backward(net)
    assert sorted(owner.seen) == [(3,), (3, 2), (3, 2)]


def test_the_hooks_do_not_keep_their_owner_or_the_model() -> None:
    net = nn.Linear(2, 3)
    references = weakref.ref(_Owner(net)), weakref.ref(net)
    gc.collect()
    assert references[0]() is None
    _backward(net)
    owner = _Owner(net)
    del net, owner
    gc.collect()
    assert references[1]() is None
