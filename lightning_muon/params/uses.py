"""Finds the modules that hold each parameter, ties and shared modules included, and what their code does with it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

from torch import nn
from torch.nn.parameter import UninitializedParameter

# Wrappers put these into qualified names: torch.compile and torch's activation checkpointing.
_WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")

# As a product reads a parameter: outputs first (`linear(x, w)`), inputs first (`x @ w`), in both ways, or as a filter;
# no product at all; or the code does not say.
Usage = Literal["outputs first", "inputs first", "product", "convolution", "no product", "unknown"]

# Function -> the side of a product on which each of its arguments stands; `linear` takes a transposed right side.
_PRODUCTS = {
    **dict.fromkeys(("matmul", "mm", "bmm", "_grouped_mm", "grouped_mm"), ("left", "right")),
    **dict.fromkeys(("addmm", "baddbmm"), ("", "left", "right")),
    "linear": ("", "left"),
}
_CONVOLUTIONS = frozenset(("conv1d", "conv2d", "conv3d"))
_TURNS = frozenset(("T", "mT", "t", "transpose", "swapaxes"))
_LAST_TWO = ({-2, -1}, {1, 2}, {0, 1})
# What leaves the matrices of a parameter as they are.
_FOLLOWED = frozenset(
    "data to type type_as float half bfloat16 contiguous clone detach to_local full_tensor unsqueeze squeeze".split()
)
_SET_UP = frozenset(("__init__", "reset_parameters", "init_weights", "_init_weights", "extra_repr", "__repr__"))
_Function = ast.FunctionDef | ast.AsyncFunctionDef

# Qualified names and modules from a root down.
Path = tuple[tuple[str, nn.Module], ...]


@dataclass(frozen=True, kw_only=True)
class Use:
    """One place where a parameter is registered."""

    name: str  # Qualified name without the parts that wrappers add.
    attribute: str  # Name of the parameter inside `owner`.
    owner: nn.Module  # The module that holds the parameter.
    path: Path  # Path from the root down to `owner`.
    parameter: nn.Parameter


def clean_name(name: str) -> str:
    """``name`` without the parts that ``torch.compile`` and activation checkpointing add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def parameter_uses(module: nn.Module) -> list[tuple[Use, ...]]:
    """The places of each distinct parameter, in the order of ``module.named_parameters()``."""
    uses: dict[int, list[Use]] = {}
    for path in walk(module):
        prefix, owner = path[-1]
        for attribute, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            name = clean_name(f"{prefix}.{attribute}" if prefix else attribute)
            if isinstance(parameter, UninitializedParameter):
                raise ValueError(
                    f"{name} of lazy module {type(owner).__name__} has no shape yet; "
                    "run one forward pass on a small batch before the optimizer or the strategy sees the model"
                )
            use = Use(name=name, attribute=attribute, owner=owner, path=path, parameter=parameter)
            uses.setdefault(id(parameter), []).append(use)
    return [tuple(places) for places in uses.values()]


def walk(module: nn.Module, name: str = "", above: Path = ()) -> Iterator[Path]:
    """Yield the path to every module, parents first; a shared module is yielded once for each of its names."""
    path = (*above, (name, module))
    yield path
    # A module that contains itself through an attribute would be walked forever.
    ancestors = {id(ancestor) for _, ancestor in path}
    for attribute, child in module._modules.items():
        if child is not None and id(child) not in ancestors:
            yield from walk(child, f"{name}.{attribute}" if name else attribute, path)


def inside_repeated_block(path: Path) -> bool:
    """Whether a module lies in a composite child of a ``ModuleList``, or of a ``Sequential`` that repeats its class."""
    for (_, parent), (_, child) in pairwise(path):
        if next(iter(child.children()), None) is None:
            continue
        if isinstance(parent, nn.ModuleList):
            return True
        if isinstance(parent, nn.Sequential) and sum(type(sibling) is type(child) for sibling in parent) > 1:
            return True
    return False


@cache
def usage(kind: type[nn.Module], attribute: str, entry: str = "") -> Usage:
    """What the methods of a class do with ``self.attribute``, or with its ``entry`` if it is a dictionary.

    Only the class that uses it is read, not the functions that it is given to.
    """
    for base in kind.__mro__:
        if base is nn.Module:
            break
        found = set[Usage]()
        for function in _methods(base):
            found |= set(_Reader(function, attribute, entry).usages())
        if found:
            products = found - {"no product", "unknown"}
            if products:
                return products.pop() if len(products) == 1 else "product"
            return "unknown" if "unknown" in found else "no product"
    return "unknown"


def _methods(kind: type) -> Iterator[_Function]:
    """The methods that a class defines, but those that make and initialize parameters."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):  # A class that was made at run time.
        return
    for node in tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else ():
        if isinstance(node, _Function) and node.name not in _SET_UP:
            yield node


class _Reader:
    """Looks at one method."""

    def __init__(self, function: _Function, attribute: str, entry: str) -> None:
        self._function, self._attribute, self._entry = function, attribute, entry
        # Names of variables that hold the parameter -> whether its last two dimensions are swapped.
        self._swapped: dict[str, bool] = {}

    def usages(self) -> Iterator[Usage]:
        """Yield how the method uses the parameter."""
        nodes = list(ast.walk(self._function))
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._name(node.targets[0].id, node.value)
            elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
                self._name(node.target.id, node.iter)
        for node in nodes:
            if isinstance(node, ast.Attribute) and self._is_swapped(node) is not None:
                yield "no product"
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                yield from self._sides((node.left, node.right), ("left", "right"))
            elif isinstance(node, ast.Call):
                yield from self._call(node)

    def _name(self, name: str, value: ast.expr) -> None:
        swapped = self._is_swapped(value)
        if swapped is not None:
            self._swapped[name] = swapped

    def _is_swapped(self, node: ast.expr) -> bool | None:
        """Whether an expression is the parameter with its last two dimensions swapped; ``None`` if it is another."""
        if isinstance(node, ast.Name):
            return self._swapped.get(node.id)
        if isinstance(node, ast.Subscript):
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            return None if isinstance(key, str) and key != self._entry else self._is_swapped(node.value)
        swaps, function = False, node.func if isinstance(node, ast.Call) else node
        if not isinstance(function, ast.Attribute):
            return None
        if isinstance(function.value, ast.Name) and function.value.id == "self" and function is node:
            return False if function.attr == self._attribute else None
        if function.attr in _TURNS:
            dims = [ast.unparse(each) for each in node.args] if isinstance(node, ast.Call) else []
            swaps = not dims or {int(dim) for dim in dims if dim.lstrip("-").isdigit()} in _LAST_TWO
        elif function.attr not in _FOLLOWED:
            return None
        inner = self._is_swapped(function.value)
        return None if inner is None else inner != swaps

    def _sides(self, arguments: Sequence[ast.expr], sides: Sequence[str]) -> Iterator[Usage]:
        for argument, side in zip(arguments, sides, strict=False):
            swapped = self._is_swapped(argument)
            if swapped is not None and side:
                yield "outputs first" if swapped == (side == "right") else "inputs first"

    def _call(self, node: ast.Call) -> Iterator[Usage]:
        function = node.func
        *of, name = ast.unparse(function).split(".")
        arguments = [*node.args, *(each.value for each in node.keywords)]
        if name in _PRODUCTS:
            is_method = len(arguments) < len(_PRODUCTS[name])  # `x.matmul(w)`.
            first = [function.value] if is_method and isinstance(function, ast.Attribute) else []
            yield from self._sides((*first, *arguments), _PRODUCTS[name])
        elif all(self._is_swapped(argument) is None for argument in arguments):
            return
        elif name in _CONVOLUTIONS:
            yield "no product" if "groups" in [each.arg for each in node.keywords] else "convolution"
        elif name == "einsum":
            yield from self._einsum(node)
        elif not of or of[0] not in ("torch", "nn", "F"):
            yield "unknown"

    def _einsum(self, node: ast.Call) -> Iterator[Usage]:
        """The matrices are the last two dimensions, and one of these is summed over."""
        inputs, _, output = ast.unparse(node.args[0]).strip("'\"").replace(" ", "").partition("->")
        for letters, argument in zip(inputs.split(","), node.args[1:], strict=False):
            swapped = self._is_swapped(argument)
            summed = [place - len(letters) for place, letter in enumerate(letters) if letter not in output]
            if swapped is not None and summed in ([-1], [-2]):
                yield "outputs first" if (summed == [-1]) != swapped else "inputs first"
