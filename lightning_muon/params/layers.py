"""Kinds of parameters: matrix, convolution, stack of matrices, elementwise, output head.

They follow from the layers that hold it, ties and shared modules included, and from what their code does with it.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, get_args

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

# Wrappers put these into qualified names: torch.compile and torch's activation checkpointing.
_WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")

# What the code of a class does with a parameter. A product reads it outputs first (`linear(x, w)`), inputs first
# (`x @ w`) or as a filter; none does; rows of it are picked; or it is handed to code that is not read.
Usage = Literal["lookup", "outputs first", "inputs first", "convolution", "unknown", "no product"]
_TURNED: dict[Usage, Usage] = {"outputs first": "inputs first", "inputs first": "outputs first"}

_PRODUCTS = frozenset("matmul mm bmm addmm baddbmm _grouped_mm grouped_mm".split())
_CONVOLUTION_CALLS = frozenset(("conv1d", "conv2d", "conv3d"))
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
    elif name in _CONVOLUTION_CALLS and weight is not None:
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


ParameterKind = Literal["matrix", "convolution", "stack", "elementwise"]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
# `Norm` in the name of a class or a base class; but neither a normal distribution nor a layer that normalizes and
# multiplies (LayerNormLinear).
_NORM_CLASS = re.compile(r"Norm(?!al(?!i[sz]))")
_NOT_NORM_CLASS = re.compile(r"linear|mlp|conv|attention|block", re.IGNORECASE)
_EMBEDDING_CLASS = re.compile(r"embedding|positional", re.IGNORECASE)

# Words in names of raw parameters whose rows are looked up or added, never multiplied as one matrix.
_TABLE_WORDS = frozenset(
    "pos posemb position positions positional pe wpe wte emb embed embeds embedding embeddings token tokens table "
    "codebook centers centroids prototypes prompt prompts latent latents".split()
)
_BIAS_WORDS = frozenset(("bias", "biases"))
# Names that torch.nn.utils.weight_norm and spectral_norm give to the weight that they replace.
_REPARAMETRIZED_WEIGHT = ("weight_v", "weight_orig")

# Words that outweigh a table word: `token_proj` and `token_mixer` are multiplied.
_MATRIX_WORDS = frozenset("proj projection projector mix mixer mixing kernel".split())
# Words of names that are taken for matrices where the code of their layer does not say how they are used.
_WEIGHT_WORDS = _MATRIX_WORDS | {"weight", "weights", "w"}


def layer_kind(use: Use) -> tuple[ParameterKind, str]:
    """Kind and reason for one use of a parameter: by the type of its layer, by its class name, by shape and name."""
    parameter, (owner, attribute) = use.parameter, _layer_of(use)
    is_known = _direct_kind(owner, 2) is not None or isinstance(owner, (*_CONVOLUTIONS, *_RECURRENT))
    if not is_known and _is_table_class(owner) and hasattr(owner, "weight"):
        return "elementwise", "embedding"
    if parameter.ndim < 2:
        return "elementwise", f"{parameter.ndim}-D"
    if not parameter.is_floating_point():
        return "elementwise", f"dtype {str(parameter.dtype).removeprefix('torch.')}"
    if any(_NORM_CLASS.search(name) and not _NOT_NORM_CLASS.search(name) for name in _class_names(owner)):
        return "elementwise", "norm"
    # One number per row or column of the weight (weight_norm).
    is_magnitude = isinstance(use.owner, ParametrizationList) and sum(size > 1 for size in parameter.shape) < 2
    if attribute == "weight" and (reason := _direct_kind(owner, parameter.ndim)) is not None and not is_magnitude:
        return reason
    if isinstance(owner, _RECURRENT) and parameter.ndim == 2:
        return "matrix", f"{_layer_name(owner)} weight"
    if isinstance(owner, nn.MultiheadAttention) and parameter.ndim == 2:
        return "matrix", "attention projection"
    return _raw_kind(use)


def _layer_of(use: Use) -> tuple[nn.Module, str]:
    """The layer that uses a parameter, and the name of its attribute that the parameter is, or stands for."""
    owner, attribute = use.owner, use.attribute
    if isinstance(owner, ParametrizationList) and len(use.path) > 2:
        # parametrizations.weight.original0 stands for `weight` of the layer two levels up.
        return use.path[-3][1], use.path[-1][0].rsplit(".", 1)[-1]
    return owner, "weight" if attribute in _REPARAMETRIZED_WEIGHT else attribute


def is_transposed(use: Use) -> bool:
    """Whether a parameter is stored as (inputs, outputs), by the class of its layer, or by its code."""
    owner, _ = _layer_of(use)
    if isinstance(owner, _TRANSPOSED) or _is_transposed_linear(owner):
        return True
    return _direct_kind(owner, use.parameter.ndim) is None and _usage(use) == "inputs first"


def _usage(use: Use) -> Usage:
    """What the code of its layer does with a parameter."""
    owner, attribute = _layer_of(use)
    return usage(type(owner), attribute, use.parameter.ndim)


def _is_transposed_linear(module: nn.Module) -> bool:
    """Whether ``module`` is the ``Conv1D`` of transformers, a linear layer."""
    return "Conv1D" in _class_names(module) and hasattr(module, "nf") and not isinstance(module, _CONVOLUTIONS)


def _direct_kind(module: nn.Module, ndim: int) -> tuple[ParameterKind, str] | None:
    """Kind and reason of the ``weight`` of a layer of torch or of a subclass, ``None`` for any other layer."""
    if isinstance(module, nn.Linear) and ndim == 2:
        return "matrix", "Linear weight"
    if isinstance(module, _CONVOLUTIONS) and ndim > 2:
        if module.groups > 1:
            # Each group, or each channel, has a matrix or a filter of its own.
            return "elementwise", f"{_layer_name(module)} in groups"
        return "convolution", f"{_layer_name(module)} weight"
    if isinstance(module, nn.Bilinear):
        return "stack", "Bilinear weight"
    if _is_transposed_linear(module) and ndim == 2:
        return "matrix", "Conv1D (linear) weight"
    return None


def _raw_kind(use: Use) -> tuple[ParameterKind, str]:
    """Judge a parameter that no known layer holds, by its shape and by the words of its name."""
    shape = tuple(use.parameter.shape)
    if shape[0] == 1:
        return "elementwise", "leading size 1"
    if sum(size > 1 for size in shape) < 2 or (len(shape) == 3 and 1 in shape):
        return "elementwise", "vector"
    words = _words(use)
    if words & _BIAS_WORDS:
        return "elementwise", "bias"
    if (words & _TABLE_WORDS or _is_table_class(use.owner)) and not words & _MATRIX_WORDS:
        return "elementwise", "learned table"
    used = _usage(use)
    if used == "lookup":
        return "elementwise", "looked up"
    if used == "no product" or (used == "unknown" and not words & _WEIGHT_WORDS):
        return "elementwise", f"{'no plain product' if used == 'no product' else 'unknown use'}; see muon_patterns"
    if len(shape) == 2:
        return "matrix", "raw 2-D parameter"
    is_stack = len(shape) == 3 and used != "convolution"
    return ("stack", f"stack of {shape[0]} matrices") if is_stack else ("convolution", f"raw {len(shape)}-D")


def _words(use: Use) -> set[str]:
    """Lower-case words of the attribute name; entries of a ParameterList are named by the list."""
    name = use.attribute
    if isinstance(use.owner, nn.ParameterList | nn.ParameterDict):
        name = f"{use.path[-1][0].rsplit('.', 1)[-1]}_{name}"
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def _is_table_class(module: nn.Module) -> bool:
    return any(_EMBEDDING_CLASS.search(name) for name in _class_names(module))


def _class_names(module: nn.Module) -> list[str]:
    """Names of the classes of ``module`` below ``nn.Module``."""
    return [base.__name__ for base in type(module).__mro__ if base is not nn.Module and issubclass(base, nn.Module)]


def _layer_name(module: nn.Module) -> str:
    """Name of the torch class that a layer is or derives from (LSTM, Conv2d)."""
    bases = (base.__name__ for base in type(module).__mro__ if base.__module__.startswith("torch.nn.modules."))
    return next(bases, type(module).__name__)


# Losses and metrics may follow the network in registration order and are no part of it.
_NOT_NETWORK = re.compile(r"Loss|Metric")


def find_output_heads(module: nn.Module) -> tuple[dict[int, str], set[int]]:
    """The output heads of ``module``: id of a weight -> reason; or else ids of weights as a guess.

    Heads are what ``get_output_embeddings()`` of any submodule returns, or linear layers with an embedding's shape; the
    guess is the last registered layer that has a weight, if it is linear and lies in no repeated block, and with it
    its twins: linear layers beside it of as many outputs whose names end in the same word (CLIP's two projections).
    """
    known = dict(_declared_heads(module)) or dict(_vocabulary_heads(module))
    return known, set() if known else set(_last_linears(module))


def _declared_heads(module: nn.Module) -> Iterator[tuple[int, str]]:
    for submodule in module.modules():
        getter = getattr(submodule, "get_output_embeddings", None)
        if not callable(getter):
            continue
        try:
            head = getter()
        except (AttributeError, RuntimeError, TypeError):
            # A model without a head may inherit a getter that raises; another library's may want arguments.
            continue
        weight = head._parameters.get("weight") if isinstance(head, nn.Module) else None
        if weight is not None:
            yield id(weight), "output head"


def _vocabulary_heads(module: nn.Module) -> Iterator[tuple[int, str]]:
    """Yield linear layers with the shape of an embedding, outside of repeated blocks.

    In a block such a shape is chance (feed-forward size = vocabulary size), and a square table (as many positions as
    channels) says nothing about a square layer.
    """
    tables = {
        (table.num_embeddings, table.embedding_dim)
        for table in module.modules()
        if isinstance(table, nn.Embedding) and table.num_embeddings != table.embedding_dim
    }
    for path in walk(module):
        layer = path[-1][1]
        # Not `layer.weight`, which a parametrization computes at each access.
        weight = layer._parameters.get("weight") if isinstance(layer, nn.Linear) else None
        if weight is not None and tuple(weight.shape) in tables and not inside_repeated_block(path):
            yield id(weight), "output head (size of the embedding)"


def _last_linears(module: nn.Module) -> Iterator[int]:
    last: Path = ()
    for path in walk(module):
        has_parameters = next(path[-1][1].parameters(recurse=False), None) is not None
        classes = [base.__name__ for _, ancestor in path[1:] for base in type(ancestor).__mro__]
        if has_parameters and path[1:] and not any(map(_NOT_NETWORK.search, classes)):
            last = path
    if not last or not isinstance(last[-1][1], nn.Linear) or inside_repeated_block(last):
        return
    head, word = last[-1][1], last[-1][0].rpartition("_")[2]
    for name, layer in last[-2][1].named_children():
        is_twin = isinstance(layer, nn.Linear) and layer.out_features == head.out_features and name.endswith(f"_{word}")
        weight = layer._parameters.get("weight")
        if weight is not None and (layer is head or is_twin):
            yield id(weight)
