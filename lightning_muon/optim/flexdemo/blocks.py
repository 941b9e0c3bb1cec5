"""Views that tie the elements of a matrix to their places in a batch of blocks."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lightning_muon.optim.flexdemo.parts import Part, Place


def paired_views(part: Part, place: Place, batch: Tensor, local: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of equally shaped views of ``batch`` and ``local`` that together hold each element of ``local`` once.

    The padding of the blocks is in none of them.

    Args:
        part: The batch.
        place: The parameter.
        batch: (num_blocks, *block_shape).
        local: The parameter's shard, or something of its shape, in row-major order.
    """
    if len(part.block_shape) == 2:
        yield from _squares(part, place, batch, local)
    else:
        size = part.block_numel if part.block_shape else 1
        first = place.first * size
        yield batch.view(-1)[first : first + place.rows * place.cols], local.view(-1)


def _squares(part: Part, place: Place, batch: Tensor, local: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The whole blocks, those at the lower and the right edge, and the corner."""
    height, width = part.block_shape
    rows, cols = place.rows, place.cols
    down, right = -(-rows // height), -(-cols // width)
    whole_down, whole_right = rows // height, cols // width
    own = batch[place.first : place.first + place.count].view(down, right, height, width)
    matrix = local.view(rows, cols)
    inner_rows, inner_cols = whole_down * height, whole_right * width
    if whole_down and whole_right:
        inner = matrix[:inner_rows, :inner_cols].unflatten(0, (whole_down, height)).unflatten(2, (whole_right, width))
        yield own[:whole_down, :whole_right].transpose(1, 2), inner
    if inner_rows < rows and whole_right:
        below = matrix[inner_rows:, :inner_cols].unflatten(1, (whole_right, width))
        yield own[whole_down, :whole_right, : rows - inner_rows].transpose(0, 1), below
    if inner_cols < cols and whole_down:
        beside = matrix[:inner_rows, inner_cols:].unflatten(0, (whole_down, height))
        yield own[:whole_down, whole_right, :, : cols - inner_cols], beside
    if inner_rows < rows and inner_cols < cols:
        corner = own[whole_down, whole_right, : rows - inner_rows, : cols - inner_cols]
        yield corner, matrix[inner_rows:, inner_cols:]
