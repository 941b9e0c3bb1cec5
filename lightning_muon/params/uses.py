"""Finds the modules that hold each parameter, ties and shared modules included, and what their code does with it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, get_args

from torch import nn
from torch.nn.parameter import UninitializedParameter

# Wrappers put these into qualified names: torch.compile and torch's activation checkpointing.
_WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")

# What the code of a class does with a parameter. A product reads it outputs first (`linear(x, w)`), inputs first
# (`x @ w`) or as a filter; none does; rows of it are picked; or it is handed to code that is not read.
Usage = Literal["lookup", "outputs first", "inputs first", "convolution", "unknown", "no product"]
_TURNED: dict[Usage, Usage] = {"outputs first": "inputs first", "inputs first": "outputs first"}

_PRODUCTS = frozenset("matmul mm bmm addmm baddbmm _grouped_mm grouped_mm".split())
_CONVOLUTIONS = frozenset(("conv1d", "conv2d", "conv3d"))
_LOOKUPS = frozenset("embedding embedding_bag index_select gather take take_along_dim".split())
# What leaves the matrices of a parameter as they are.
_COPIES = frozenset(
    "to type type_as float half bfloat16 contiguous clone detach to_local full_tensor unsqueeze squeeze flatten "
    "reshape view".split()
)
_TORCH = frozenset("torch nn F functional".split())
_SET_UP = frozenset(("__init__", "reset_parameters", "init_weights", "_init_weights", "extra_repr", "__repr__"))

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
def usage(kind: type[nn.Module], attribute: str, ndim: int) -> Usage:
    """What the methods of a class do with ``self.attribute``, as far as plain code says it.

    A table whose rows are looked up is no matrix, whatever else is done with it.
    """
    found = {use for method in _methods(kind) for use in _uses_in(method, f"self.{attribute}", ndim)}
    return next((each for each in get_args(Usage) if each in found), "unknown")


@cache
def _methods(kind: type) -> list[ast.AST]:
    """The methods of a class and of its bases, but those that initialize parameters, or that others override."""
    found: dict[str, ast.AST] = {}
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, SyntaxError, ValueError):  # A class that was made at run time.
            continue
        for each in tree.body if isinstance(tree, ast.ClassDef) else ():
            if not isinstance(each, ast.FunctionDef) or each.name in _SET_UP:
                continue
            if each.name not in found:
                found[each.name] = each
            elif f"super().{each.name}(" in ast.unparse(found[each.name]):
                found[f"{base.__qualname__}.{each.name}"] = each
    return list(found.values())


def _uses_in(method: ast.AST, parameter: str, ndim: int) -> Iterator[Usage]:
    names = _names_of(method, parameter, ndim)
    for node in ast.walk(method):
        for expression, use in _reads(node):
            turned = _turned(expression, names)
            if turned is not None and (use != "lookup" or ndim == 2):
                yield _TURNED.get(use, use) if turned else use


def _names_of(method: ast.AST, parameter: str, ndim: int) -> dict[str, bool]:
    """What stands for a parameter, or a matrix of a stack, and whether with its last two dimensions swapped."""
    nodes = list(ast.walk(method))
    stored = Counter(each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
    names = {parameter: False}
    for node in nodes:
        match node:
            case ast.Assign([ast.Name() as target], value) | ast.AnnAssign(
                ast.Name() as target, _, ast.expr() as value
            ):
                bound = [(target.id, value)]
            case ast.For(target, value) | ast.comprehension(target, value) if ndim > 2:
                bound = _bound_in_loop(target, value)
            case _:
                continue
        for name, value in bound:
            turned = _turned(value, names)
            if turned is not None and stored[name] == 1:
                names[name] = turned
    return names


def _bound_in_loop(target: ast.AST, iterable: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Each name that a loop binds, and what it goes over."""
    match target, iterable:
        case ast.Name(name), _:
            yield name, iterable
        case ast.Tuple([_, inner]), ast.Call(ast.Name("enumerate"), [value, *_]):
            yield from _bound_in_loop(inner, value)
        case ast.Tuple(targets), ast.Call(ast.Name("zip"), values):
            for inner, value in zip(targets, values, strict=False):
                yield from _bound_in_loop(inner, value)
        case _:
            pass


def _turned(node: ast.AST, names: Mapping[str, bool]) -> bool | None:
    """Whether an expression is a parameter with its last two dimensions swapped; ``None`` if it is something else."""
    match node:
        case ast.Name() | ast.Attribute(ast.Name("self")):
            return names.get(ast.unparse(node))
        case ast.Attribute(value, "T" | "mT") | ast.Call(ast.Attribute(value, "t" | "transpose" | "swapaxes")):
            turned = _turned(value, names)
            return None if turned is None else not turned
        case ast.Attribute(value, "data") | ast.Subscript(value):
            return _turned(value, names)
        case ast.Call(ast.Attribute(value, name)) if name in _COPIES:
            return _turned(value, names)
        case ast.BinOp(value, ast.Mult() | ast.Div(), ast.Constant() | ast.Attribute(ast.Name("self"))):
            return _turned(value, names)  # Scaled, or masked.
        case _:
            return None


def _reads(node: ast.AST) -> Iterator[tuple[ast.expr, Usage]]:
    """The expressions that an operation may read as a weight, and as what kind of one."""
    match node:
        case ast.Attribute(ast.Name("self")):
            yield node, "no product"
        case ast.Subscript(value, key):
            keys = key.elts if isinstance(key, ast.Tuple) else [key]
            if not all(isinstance(each, ast.Slice) or ast.unparse(each) in ("None", "...") for each in keys):
                yield value, "lookup"
        case ast.BinOp(left, ast.MatMult(), right):
            yield left, "outputs first"
            yield right, "inputs first"
        case ast.Call():
            yield from _read_by(node)
        case _:
            pass


def _read_by(call: ast.Call) -> Iterator[tuple[ast.expr, Usage]]:
    of, _, name = ast.unparse(call.func).rpartition(".")
    named = {each.arg: each.value for each in call.keywords}
    weight = named.get("weight") or (call.args[1] if len(call.args) > 1 else None)
    if name == "einsum" and call.args and isinstance(call.args[0], ast.Constant):
        yield from _read_by_einsum(str(call.args[0].value), call.args[1:])
    elif name in _PRODUCTS and call.args:
        is_method = isinstance(call.func, ast.Attribute) and of.rpartition(".")[2] not in _TORCH
        *_, left, right = [call.func.value if is_method else call.args[0], *call.args]  # type: ignore[attr-defined]
        yield left, "outputs first"
        yield right, "inputs first"
    elif name == "linear" and weight is not None:
        yield weight, "outputs first"
    elif name in _CONVOLUTIONS and weight is not None:
        yield weight, "no product" if "groups" in named or len(call.args) > 6 else "convolution"
    elif name in _LOOKUPS and isinstance(call.func, ast.Attribute):
        for each in (call.func.value, *call.args, *named.values()):
            yield each, "lookup"
    elif of.rpartition(".")[2] not in _TORCH:
        for each in (*call.args, *named.values()):
            yield each, "unknown"


def _read_by_einsum(equation: str, tensors: Sequence[ast.expr]) -> Iterator[tuple[ast.expr, Usage]]:
    """A product sums over one of the last two dimensions of a weight, and no other input has the other one."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    for place, (term, tensor) in enumerate(zip(terms, tensors, strict=False)):
        others = "".join(terms[:place] + terms[place + 1 :])
        match [letter for letter in term if letter not in output], term[-2:]:
            case [summed], pair if summed in pair and pair.replace(summed, "") not in others:
                yield tensor, "inputs first" if pair[0] == summed else "outputs first"
            case _:
                pass
