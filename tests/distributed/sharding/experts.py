"""Models of which ranks run different parts."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon import ModeOptions
from lightning_muon.monitor.watchdog import Watchdog
from lightning_muon.sharding.fsdp import Fsdp
from lightning_muon.sharding.guards import CallLog


class Expert(nn.Module):
    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.up = nn.Linear(7, width)
        self.down = nn.Linear(width, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.before = nn.Linear(7, 7)
        self.experts = nn.ModuleList(Expert(width) for width in widths)
        self.after = nn.Linear(7, 7)

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        x = self.before(x)
        for index in chosen:
            x = self.experts[index](x)
        return self.after(x)


class Mixture(nn.Module):
    def __init__(self, widths: Sequence[int] = (13, 13)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(widths) for _ in range(2))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        for layer in self.layers:
            x = layer(x, chosen)
        return self.head(x)


def sharded(mesh: DeviceMesh, units: Sequence[str], widths: Sequence[int] = (13, 13)) -> tuple[Mixture, Fsdp]:
    """A mixture whose modules of the classes ``units`` are units."""
    torch.manual_seed(0)
    model = Mixture(widths)
    mode = Fsdp(mesh, ModeOptions(wrap_policy=list(units)))
    mode.prepare(model)
    mode.attach(model, [torch.optim.SGD(model.parameters())])
    return model, mode


def inputs_of(rank: int) -> Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(rank))


@contextmanager
def watching(
    call_log: CallLog | None, *, patience: float = 4.0, interval: float = 0.5, silence: timedelta | None = None
) -> Generator[Watchdog]:
    assert call_log is not None
    watchdog = Watchdog(call_log, patience=patience, interval=interval, silence=silence)
    watchdog.start()
    try:
        yield watchdog
    except BaseException as error:
        watchdog.failed(error)
        raise
    finally:
        watchdog.close()
