"""Finds the modules that hold each parameter, ties and shared modules included, and what their code does with it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

from torch import nn
from torch.nn.parameter import UninitializedParameter

# Wrappers put these into qualified names: torch.compile and torch's activation checkpointing.
_WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")

# As a product reads a parameter: outputs first (`linear(x, w)`), inputs first (`x @ w`), in both ways, or as a filter;
# no product at all, or rows that are picked by tensors; or the code does not say.
Usage = Literal[
    "outputs first",
    "inputs first",
    "product",
    "convolution",
    "transposed convolution",
    "no product",
    "lookup",
    "unknown",
]

# Function -> the side of a product on which each of its arguments stands; so for arguments by name.
_PRODUCTS = {
    **dict.fromkeys(("matmul", "mm", "bmm", "_grouped_mm", "grouped_mm"), ("left", "right")),
    **dict.fromkeys(("addmm", "baddbmm"), ("", "left", "right")),
    "linear": ("", "weight"),
}
_SIDES = {"weight": "weight", **dict.fromkeys(("other", "mat2", "batch2"), "right")}
_CONVOLUTIONS = {f"conv{kind}{n}d": "input weight bias _ _ _ groups" for kind in ("", "_transpose") for n in (1, 2, 3)}
_LOOKUPS = frozenset("embedding embedding_bag index_select gather take take_along_dim".split())
_MODULES = frozenset("torch nn F functional _nn einops".split())
_TURNS = frozenset(("T", "mT", "t", "transpose", "swapaxes"))
_LAST_TWO = ({-2, -1}, {1, 2}, {0, 1})
# What leaves the matrices of a parameter as they are, or in an order that is not followed.
_FOLLOWED = frozenset(
    "data to type type_as float half bfloat16 contiguous clone detach to_local full_tensor unsqueeze squeeze "
    "chunk split reversed list tuple".split()
)
_RESHAPED = frozenset("view reshape permute movedim flatten unflatten".split())
# What says something about a parameter, and does not use its values.
_FACTS = frozenset(
    "shape device dtype ndim grad requires_grad size dim numel norm stride isinstance len hasattr print id type".split()
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
def usage(kind: type[nn.Module], attribute: str, entry: str = "", ndim: int = 2) -> Usage:
    """What the methods of a class do with ``self.attribute``, or with its ``entry`` if it is a list or a dictionary.

    Only the class that uses it is read, not the functions that it is given to. A table whose rows are looked up is
    no matrix, whatever else is done with it.
    """
    found = set[Usage]()
    returned: dict[str, _View | None] = {}
    for _ in range(2):  # A second time, with what the class's own methods return.
        found.clear()
        for function in _methods(kind):
            reader = _Reader(attribute, entry, ndim, returned)
            reader.visit(function)
            found |= reader.found
            returned[function.name] = reader.returned
    products = found - {"no product", "unknown"}
    if "lookup" in found:
        return "lookup"
    if products:
        return products.pop() if len(products) == 1 else "product"
    return "no product" if found == {"no product"} else "unknown"


def _methods(kind: type) -> list[_Function]:
    """The methods of a class and of its bases, but those that are overridden and those that initialize parameters."""
    methods: dict[str, _Function] = {}
    for base in kind.__mro__:
        for function in _own_methods(base) if base not in (nn.Module, object) else ():
            above = methods.get(function.name)
            if above is None:
                methods[function.name] = function
            elif f"super().{function.name}(" in ast.unparse(above):
                methods.setdefault(f"{base.__qualname__}.{function.name}", function)
    return list(methods.values())


@cache
def _own_methods(kind: type) -> list[_Function]:
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # A class that was made at run time.
        return []
    body = node.body if isinstance(node, ast.ClassDef) else ()
    return [each for each in body if isinstance(each, _Function) and each.name not in _SET_UP]


class _View(NamedTuple):
    """What the value of an expression has of the parameter."""

    picks: int  # How many indices lead to one matrix; more of them take rows.
    swapped: bool | None = False  # Whether the last two dimensions are swapped; None where that is not followed.
    is_weight: bool = True  # Not one of several values, nor computed with others.


_Value = _View | None | list["_Value"]  # A list for a tuple in the code.


def _either(first: _View | None, second: _View | None) -> _View | None:
    """One of two values."""
    if first is None or second is None:
        one = first or second
        return one and one._replace(is_weight=False)
    swapped = first.swapped if first.swapped == second.swapped else None
    return _View(min(first.picks, second.picks), swapped, first.is_weight and second.is_weight)


class _Reader:
    """Follows a parameter through a method, statement by statement."""

    def __init__(self, attribute: str, entry: str, ndim: int, methods: Mapping[str, _View | None]) -> None:
        self.found, self.returned = set[Usage](), None
        self._attribute, self._entry, self._matrix_picks, self._methods = attribute, entry, ndim - 2, methods
        self._names: dict[str, _View | None] = {}
        self._texts: dict[str, str] = {}

    def visit(self, node: ast.AST | None) -> _View | None:
        """Add to ``found`` what a statement or an expression does with the parameter; what its value has of it."""
        match node:
            case ast.Name():
                return self._names.get(node.id)
            case ast.Attribute(ast.Name("self"), attribute):
                is_it = attribute == self._attribute
                return _View(self._matrix_picks + bool(self._entry)) if is_it else self._methods.get(attribute)
            case ast.Attribute():
                return self._change(self.visit(node.value), node.attr, ())
            case ast.Subscript():
                return self._subscript(node)
            case ast.Call():
                return self._call(node)
            case ast.BinOp():
                return self._binary(node)
            case ast.UnaryOp(_, value) | ast.Starred(value):
                return self.visit(value)
            case ast.Tuple(values) | ast.List(values):
                return next((view for view in map(self.visit, values) if view), None)
            case ast.IfExp():
                self.visit(node.test)
                return _either(self.visit(node.body), self.visit(node.orelse))
            case ast.ListComp() | ast.GeneratorExp():
                for loop in node.generators:
                    self._bind(loop.target, self._each(loop.iter))
                return self.visit(node.elt)
            case ast.NamedExpr() | ast.AnnAssign():
                self._bind(node.target, view := self.visit(node.value))
                return view
            case ast.Assign([ast.Name(name)], ast.Constant(str(text))):
                self._texts[name] = text
            case ast.Assign():
                values = node.value.elts if isinstance(node.value, ast.Tuple) else ()
                for target in node.targets:
                    self._bind(target, [self.visit(each) for each in values] or self.visit(node.value))
            case ast.AugAssign():
                self._bind(node.target, self._binary(ast.BinOp(node.target, node.op, node.value)))
            case ast.Return():
                view = self.visit(node.value)
                self.returned = _either(self.returned, view) if self.returned else view
            case ast.If():
                self._branches(node)
            case ast.For() | ast.While():
                for each in ast.walk(node):  # What the loop sets again may have either value.
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                        self._names[each.id] = _either(self._names.get(each.id), None)
                if isinstance(node, ast.For):
                    self._bind(node.target, self._each(node.iter))
                self._all(node.body)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._names |= dict.fromkeys(each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg))
                self._all(node.body)
            case ast.Compare():
                self._all([node.left, *node.comparators])
            case ast.AST():
                return self._used(self._all(ast.iter_child_nodes(node)), "unknown")
            case None:
                pass
        return None

    def _branches(self, node: ast.If) -> None:
        self.visit(node.test)
        before = dict(self._names)
        self._all(node.body)
        after, self._names = self._names, before
        self._all(node.orelse)
        joined = {name: _either(after[name], self._names[name]) for name in after.keys() & self._names.keys()}
        self._names = {**after, **self._names, **joined}

    def _all(self, nodes: Iterable[ast.AST]) -> list[_View | None]:
        return [self.visit(node) for node in nodes]

    def _used(self, views: Iterable[_View | None], usage: Usage) -> _View | None:
        """Note how these are used; the result has something of them, but is no weight."""
        present = [view for view in views if view is not None]
        if any(view.is_weight for view in present):
            self.found.add(usage)
        return present[0]._replace(is_weight=False) if present else None

    def _bind(self, target: ast.expr, value: _Value) -> None:
        """Let names stand for a value, or those of a tuple for each of its values."""
        if isinstance(target, ast.Tuple | ast.List):
            values = value if isinstance(value, list) else [value] * len(target.elts)
            for inner, each in zip(target.elts, values, strict=False):
                self._bind(inner, each)
            return
        view = next((each for each in value if isinstance(each, _View)), None) if isinstance(value, list) else value
        if isinstance(target, ast.Name):
            self._names[target.id] = view
        else:
            self._used([view], "unknown")

    def _each(self, node: ast.expr) -> _Value:
        """What each round of a loop over an expression gets."""
        match node:
            case ast.Call(ast.Name("zip"), iterables):
                return [self._each(each) for each in iterables]
            case ast.Call(ast.Name("enumerate"), [iterable, *_]):
                return [None, self._each(iterable)]
            case ast.Call(ast.Attribute(dictionary, "items" | "values" as which)):
                each = self._each(dictionary)
                return [None, each] if which == "items" else each
        view = self.visit(node)
        return view._replace(picks=view.picks - 1) if view and view.picks else self._used([view], "no product")

    def _subscript(self, node: ast.Subscript) -> _View | None:
        view, keys = self.visit(node.value), node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if view is None:
            return self.visit(node.slice)
        in_list = view.picks > self._matrix_picks
        if in_list and isinstance(keys[0], ast.Constant) and str(keys[0].value) != self._entry:
            return None  # Another entry.
        is_kept = [isinstance(key, ast.Slice) or ast.unparse(key) in ("None", "...") for key in keys]
        if is_kept.count(False) > view.picks:
            return self._used([view], "lookup")
        return view._replace(picks=view.picks - in_list)  # Of a stack, a tensor may pick several matrices.

    def _binary(self, node: ast.BinOp) -> _View | None:
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, ast.MatMult):
            self._product(left, "left")
            self._product(right, "right")
            return None
        # With numbers and other tensors of the layer it stays a weight.
        others = ast.walk(node.right if left else node.left)
        is_own = all(each.id == "self" for each in others if isinstance(each, ast.Name))
        return (left or right) if is_own else self._used([left, right], "no product")

    def _product(self, view: _View | None, side: str) -> None:
        if view is None:
            return
        if side == "weight" or (view.is_weight and side):
            is_turned = None if view.swapped is None else view.swapped == (side != "right")
            self.found.add("product" if is_turned is None else "inputs first" if is_turned else "outputs first")
        elif view.is_weight or side == "right":  # On the right may be a weight that was computed.
            self.found.add("unknown" if side else "no product")

    def _change(self, view: _View | None, name: str, arguments: Sequence[ast.expr]) -> _View | None:
        """What a method, or a function of torch, makes of the parameter."""
        if view is None or name in _FOLLOWED:
            return view
        if name in _FACTS:
            return None
        if name in _RESHAPED:
            return view._replace(swapped=None)
        if name in _TURNS:
            dims = {int(dim) for dim in map(ast.unparse, arguments) if dim.lstrip("-").isdigit()}
            swaps = view.swapped is not None and (not arguments or dims in _LAST_TWO)
            return view._replace(swapped=not view.swapped) if swaps else view
        return self._used([view], "no product")

    def _call(self, node: ast.Call) -> _View | None:
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        named = {each.arg: each.value for each in node.keywords}
        if isinstance(of, ast.Name) and of.id == "self":
            return self.visit(node.func) or self._used(map(self.visit, [*node.args, *named.values()]), "unknown")
        is_method = of is not None and ast.unparse(of).rpartition(".")[2] not in _MODULES
        given = [of, *node.args] if is_method and of is not None else node.args
        views: list[_View | None] = [self.visit(each) for each in (*given, *named.values())]
        if not any(views):
            return None
        if name in _PRODUCTS and not (is_method and name == "linear"):
            sides = [*_PRODUCTS[name], *[""] * len(given)][: len(given)] + [_SIDES.get(key or "", "") for key in named]
            for view, side in zip(views, sides, strict=True):
                self._product(view, side)
        elif name in _CONVOLUTIONS:
            arguments = dict(zip(_CONVOLUTIONS[name].split(), given, strict=False)) | named
            is_weight = "weight" in arguments and self.visit(arguments["weight"]) is not None
            in_groups = "groups" in arguments and ast.unparse(arguments["groups"]) != "1"
            filters: Usage = "transposed convolution" if "transpose" in name else "convolution"
            self.found.add(filters if is_weight and not in_groups else "no product")
        elif name in _LOOKUPS:
            self._used(views, "lookup")
        elif name == "einsum":
            self._einsum(given)
        elif given and views[0] and (of is not None or name in _FACTS | _FOLLOWED):
            return self._change(views[0], name, given[1:])
        else:
            return self._used(views, "unknown" if of is None or is_method else "no product")
        return None

    def _einsum(self, given: Sequence[ast.expr]) -> None:
        """The matrices are the last two dimensions; one of these is summed over, and the other is in no other input."""
        texts = [self._texts.get(ast.unparse(each), getattr(each, "value", None)) for each in given]
        equation = next((text for text in texts if isinstance(text, str) and "->" in text), "")
        *inputs, output = [
            term.split() if " " in term.strip() else list(term.strip())
            for term in equation.replace("->", ",").split(",")
        ]
        tensors = [self.visit(each) for each, text in zip(given, texts, strict=True) if text != equation]
        for place, view in enumerate(tensors):
            letters = inputs[place] if place < len(inputs) else []
            others = {letter for term in (*inputs[:place], *inputs[place + 1 :]) for letter in term}
            summed = [index for index, letter in enumerate(letters, -len(letters)) if letter not in output]
            if not equation:
                self._used([view], "unknown")
            elif summed in ([-1], [-2]) and len(letters) > 1 and letters[-3 - summed[0]] not in others:
                self._product(view, "right" if summed == [-2] else "left")
            else:
                self._used([view], "no product")
