"""Frozen dataclasses with every option and its default: the one list for Python, YAML and command line.

Also what all options share: checks of their values, and what is said of a name that does not exist.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

from lightning_muon.removed import removed

VERSION = "0.2.0"
T = TypeVar("T")

AdjustLr = Literal["original", "match_rms_adamw", "spectral_mup"]
# (a, b, c) of a Newton-Schulz step x <- a x + b x^3 + c x^5.
Quintic = tuple[float, float, float]
NsPreset = Literal["jordan", "polar_express"]
NsCoefficients = NsPreset | Quintic | tuple[Quintic, ...]
NsMethod = Literal["plain", "gram"]
NsQuality = Literal["reference", "fast"]
# What takes the place of Newton-Schulz: (matrices, *, newton_schulz) -> updates; see docs/family.md.
Orthogonalize = Callable[..., Any] | Literal["newton_schulz"]
Algorithm = Literal["auto", "muon", "adamw"]
DtypeName = Literal["auto", "float32", "bfloat16"]
ComputeDtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Dedupe = Literal["auto", "always", "never"]
Overlap = Literal["step", "off"]
# Muon's learning rate over AdamW's, where one was chosen for AdamW: see docs/performance.md.
MEASURED_MUON_LR_FACTOR = 3.0


def nearest(name: str, names: Sequence[str]) -> str | None:
    """Guess which of the names is meant by ``name``, by its initials (``learning_rate`` is ``lr``) or its letters."""
    initials = "".join(part[:1] for part in name.split("_"))
    if len(initials) > 1 and initials in names:
        return initials
    return next(iter(difflib.get_close_matches(name, names, n=1)), None)


def unknown_option(key: object, names: Sequence[str], *, of: str = "") -> str:
    """Text for an option that the class ``of`` does not have: why it went, or that of :func:`no_option`."""
    return removed(str(key), of) or no_option(key, names)


def no_option(key: object, names: Sequence[str]) -> str:
    """Text for an option that does not exist: where it belongs, the nearest one, or all of ``names``."""
    if key in [field.name for field in fields(MuonConfig)]:
        hint = "it is one of MuonConfig, which optimizer= takes"
    elif (found := nearest(str(key), names)) is not None:
        hint = f"did you mean {found!r}?"
    else:
        hint = f"the options are {', '.join(names)}" if names else "it takes none"
    return f"there is no option {key!r}; {hint}"


def from_arguments(config: type[T], arguments: Mapping[str, Any]) -> T:
    """The dataclass ``config`` with those of ``arguments``, the ``locals()`` of a constructor, that are its fields."""
    return config(**{field.name: arguments[field.name] for field in fields(config) if field.name in arguments})  # type: ignore[arg-type]


def takes_options(config: type[Any] | None = None) -> Callable[[type[T]], type[T]]:
    """Decorator of a class whose keyword arguments are options.

    Where a constructor takes ``**options``, its signature, which LightningCLI reads, has the fields of the dataclass
    ``config``. An unknown keyword raises a ``TypeError`` with the text of :func:`unknown_option`.
    """

    def decorate(kind: type[T]) -> type[T]:
        init = kind.__init__
        if is_dataclass(kind):
            # jsonargparse looks up names of types in the module of the class, which may lack those of its bases.
            init.__annotations__ |= get_type_hints(kind)
        signature = _signature(init, config)
        names = [name for name in signature.parameters if name != "self"]
        are_named = all(signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in names)

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            if args and are_named:
                of, got = type(self).__name__, type(args[0]).__name__
                raise TypeError(f"{of}: name the option that the {got} is for; the options are {', '.join(names)}")
            for key in kwargs:
                if key not in names:
                    raise TypeError(f"{(of := type(self).__name__)}: {unknown_option(key, names, of=of)}")
            init(self, *args, **kwargs)

        setattr(checked, "__signature__", signature)  # noqa: B010
        setattr(kind, "__init__", checked)  # noqa: B010 - type checkers refuse the plain assignment
        return kind

    return decorate


def _signature(init: Callable[..., None], config: type[Any] | None) -> inspect.Signature:
    """The signature of a constructor, with the fields of ``config`` in the place of its ``**options``."""
    own = inspect.signature(init, eval_str=True)
    parameters = [each for each in own.parameters.values() if each.kind != each.VAR_KEYWORD]
    if config is None or len(parameters) == len(own.parameters):
        return own
    types, known = get_type_hints(config), {each.name for each in parameters}
    for each in fields(config):
        if each.name not in known:
            default = each.default if each.default_factory is MISSING else each.default_factory()
            parameters.append(
                inspect.Parameter(
                    each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[each.name]
                )
            )
    return own.replace(parameters=parameters)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Options that all optimizers of the package have.

    The names and defaults are those of ``torch.optim.Muon``, but for ``adjust_lr_fn``: ``match_rms_adamw`` lets a
    learning rate that was tuned for AdamW carry over (Liu et al. 2025, arXiv:2502.16982, section 2.2).

    Args:
        lr: Learning rate, per optimizer step.
        weight_decay: Decoupled weight decay. A step multiplies matrices on Muon by ``1 - lr * muon_lr_factor *
            weight_decay``, other parameters by ``1 - lr * weight_decay``. The factor of ``adjust_lr_fn`` is no part of
            it.
        momentum: Decay of the exponential moving average of the gradients.
        nesterov: Orthogonalize the look-ahead ``lerp(grad, momentum_buffer, momentum)``, not the buffer itself.
        ns_coefficients: ``(a, b, c)`` of the quintic Newton-Schulz polynomial (https://kellerjordan.github.io/posts/muon),
            one for each step, or ``"polar_express"`` (Amsel et al. 2025, arXiv:2505.16932).
        eps: Lower bound of the Frobenius norm by which a matrix is divided before Newton-Schulz.
        ns_steps: Number of Newton-Schulz iterations.
        ns_quality: ``"reference"``: the steps of ``ns_coefficients`` and ``ns_steps``, by the arithmetic of
            torch.optim.Muon, bit for bit. ``"fast"``: three steps of Polar Express, on the Gram matrix where that costs
            fewer FLOPs; singular values of at least 0.01 of the norm of a matrix end between 0.65 and 1.35.
        orthogonalize: ``"newton_schulz"``, or a function ``(matrices, *, newton_schulz) -> updates`` that is called on
            the owner with whole matrices (batch, outputs, inputs), as Muon+ in docs/family.md. ``newton_schulz`` is the
            function that it takes the place of. Updates have the shape and the dtype of the matrices.
        adjust_lr_fn: Factor on the learning rate of a matrix: ``"original"`` ``sqrt(max(1, outputs / inputs))``,
            ``"match_rms_adamw"`` ``0.2 * sqrt(max(rows, cols))``, ``"spectral_mup"`` ``sqrt(outputs / inputs)``.
        muon_lr_factor: Matrices on Muon have the learning rate ``lr * muon_lr_factor``, in their weight decay too, so
            that schedulers act on both. ``"auto"``: 3 for a ParallelMuon, and 6 for a FlexDeMo, that takes the place of
            an AdamW or that the package makes for a program (as measured in docs/performance.md), 1 for one that a
            program makes itself.
        betas: Decay rates of AdamW, for the parameters that are no matrices.
        adamw_eps: Denominator term of AdamW.
        adamw_patterns: Shell patterns of qualified names that AdamW takes whatever their type.
        muon_patterns: Shell patterns of qualified names that Muon takes whatever their type.
        fused: Pattern of a fused weight -> number of equal parts, or the sizes of the parts (Q, K, V, or the heads of
            each) along its output features; every part is orthogonalized on its own.
        fused_inputs: The same along the input features, as the heads lie in the output projection of attention.
        compute_dtype: Of Newton-Schulz. ``"auto"``: bfloat16 where the device multiplies it faster, else float32.
        wire_dtype: Of the matrices and updates that travel between ranks. ``"auto"``: the compute dtype, bfloat16 for
            float16, in which small gradients would be zero.
        error_if_nonfinite: Skip the step on all ranks, weights and state untouched, when a gradient has a NaN or Inf.
        max_skipped_steps: So many steps in a row are skipped; the next one raises, with the names of the parameters.
    """

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: NsCoefficients = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    ns_quality: NsQuality = "reference"
    orthogonalize: Orthogonalize = "newton_schulz"
    adjust_lr_fn: AdjustLr = "match_rms_adamw"
    muon_lr_factor: float | Literal["auto"] = "auto"
    betas: tuple[float, float] = (0.9, 0.999)
    adamw_eps: float = 1e-8
    adamw_patterns: tuple[str, ...] = ()
    muon_patterns: tuple[str, ...] = ()
    fused: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict[str, "int | tuple[int, ...]"])
    fused_inputs: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict[str, "int | tuple[int, ...]"])
    compute_dtype: ComputeDtypeName = "auto"
    wire_dtype: DtypeName = "auto"
    error_if_nonfinite: bool = True
    max_skipped_steps: int = 3

    def __post_init__(self) -> None:
        check_hyperparameters(vars(self))
        check_one_of("compute_dtype", self.compute_dtype, get_args(ComputeDtypeName))
        check_one_of("wire_dtype", self.wire_dtype, get_args(DtypeName))
        for key in ("adamw_patterns", "muon_patterns"):
            patterns = getattr(self, key)
            is_sequence = isinstance(patterns, Collection) and not isinstance(patterns, str)
            if not (is_sequence and all(isinstance(pattern, str) for pattern in patterns)):
                raise ValueError(
                    f"{key} must be a sequence of patterns, such as ('*.router.weight',), got {patterns!r}"
                )
        for key in ("fused", "fused_inputs"):
            _check_fused(key, getattr(self, key))
        check_flag("error_if_nonfinite", self.error_if_nonfinite)
        check_whole("max_skipped_steps", self.max_skipped_steps, at_least=0)

    @property
    def measured_lr_factor(self) -> float:
        """``muon_lr_factor`` that is best where the learning rate was chosen for AdamW."""
        return MEASURED_MUON_LR_FACTOR

    @property
    def lr_factor_over_adamw(self) -> float:
        """The one that counts there."""
        return self.measured_lr_factor if self.muon_lr_factor == "auto" else self.muon_lr_factor


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """How matrices get to their owners and back.

    Args:
        bucket_bytes: How many bytes of a bucket, the matrices that travel together, a rank owns on average; a bucket
            has at least one matrix for each rank, however large.
        dedupe: Where parameters are replicated (hybrid sharding, DDP): ``"always"`` one owner for all replicas,
            ``"never"`` one in each, ``"auto"`` by the FLOPs that it saves and the bytes that it costs, per matrix.
        overlap: ``"step"``: transfers hide behind the arithmetic of the step, ``"off"``: one after the other. The
            weights are the same, bit for bit.
        look_ahead: Buckets that are gathered or on their way at a time during the step.
    """

    bucket_bytes: int = 4 * 2**20
    dedupe: Dedupe = "auto"
    overlap: Overlap = "step"
    look_ahead: int = 3

    def __post_init__(self) -> None:
        for key in ("bucket_bytes", "look_ahead"):
            check_whole(key, getattr(self, key), at_least=1)
        for key, allowed in (("dedupe", Dedupe), ("overlap", Overlap)):
            check_one_of(key, getattr(self, key), get_args(allowed))


@takes_options()
@dataclass(frozen=True, kw_only=True)
class MuonConfig(ExchangeOptions, OptimizerConfig):
    """Hyper-parameters and execution options of :class:`lightning_muon.ParallelMuon`.

    Args:
        normuon: Divide each row of an orthogonalized matrix, a neuron, by the root of its second moment, and keep the
            norm of the whole (NorMuon: Li et al. 2025, arXiv:2510.05491, Algorithm 1).
        normuon_beta2: Decay of these second moments.
    """

    normuon: bool = False
    normuon_beta2: float = 0.95

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        ExchangeOptions.__post_init__(self)


class OptimizerOptions(TypedDict, total=False):
    """The fields of :class:`OptimizerConfig` that optimizers take as ``**options``, for editors."""

    nesterov: bool
    ns_coefficients: NsCoefficients
    eps: float
    ns_steps: int
    ns_quality: NsQuality
    orthogonalize: Orthogonalize
    adjust_lr_fn: AdjustLr
    muon_lr_factor: float | Literal["auto"]
    betas: tuple[float, float]
    adamw_eps: float
    adamw_patterns: tuple[str, ...]
    muon_patterns: tuple[str, ...]
    fused: Mapping[str, int | tuple[int, ...]]
    fused_inputs: Mapping[str, int | tuple[int, ...]]
    compute_dtype: ComputeDtypeName
    wire_dtype: DtypeName
    error_if_nonfinite: bool
    max_skipped_steps: int


class MuonOptions(OptimizerOptions, total=False):
    """Those of :class:`MuonConfig`."""

    bucket_bytes: int
    dedupe: Dedupe
    overlap: Overlap
    look_ahead: int
    normuon: bool
    normuon_beta2: float


def check_hyperparameters(group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for the first hyper-parameter of a parameter group that is out of range."""
    for key in ("lr", "weight_decay", "momentum", "eps", "adamw_eps", "muon_lr_factor"):
        if key == "muon_lr_factor" and group[key] == "auto":
            continue
        check_number(key, group[key])
        if not 0.0 <= float(group[key]) < math.inf:
            raise ValueError(f"{key} must be finite and >= 0, got {group[key]}")
    if float(group["momentum"]) >= 1.0:
        raise ValueError(f"momentum must be in [0, 1), got {group['momentum']}")
    betas = group["betas"]
    if not (_are_numbers(betas, 2) and all(0.0 <= float(beta) < 1.0 for beta in betas)):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
    _check_newton_schulz(group)
    check_flag("nesterov", group.get("nesterov", True))
    check_one_of("adjust_lr_fn", group.get("adjust_lr_fn", "original"), get_args(AdjustLr))
    check_one_of("algorithm", group.get("algorithm", "auto"), get_args(Algorithm))
    check_flag("normuon", group.get("normuon", False))
    check_number("normuon_beta2", group.get("normuon_beta2", 0.0))
    if not 0.0 <= float(group.get("normuon_beta2", 0.0)) < 1.0:
        raise ValueError(f"normuon_beta2 must be in [0, 1), got {group['normuon_beta2']}")


def _check_newton_schulz(group: Mapping[str, Any]) -> None:
    coefficients, num_steps, quality = group["ns_coefficients"], group["ns_steps"], group.get("ns_quality", "reference")
    if not (type(num_steps) is int and 1 <= num_steps < 100):
        raise ValueError(f"ns_steps must be in [1, 99], got {num_steps}")
    if isinstance(coefficients, str):
        check_one_of("ns_coefficients", coefficients, get_args(NsPreset))
    elif isinstance(coefficients, tuple | list) and coefficients and all(map(_are_coefficients, coefficients)):
        if len(coefficients) != num_steps:
            raise ValueError(f"ns_coefficients has {len(coefficients)} steps, but ns_steps is {num_steps}")
    elif not _are_coefficients(coefficients):
        raise ValueError(
            f"ns_coefficients must be three numbers (a, b, c), three for each step, or a name, got {coefficients}"
        )
    check_one_of("ns_quality", quality, get_args(NsQuality))
    function: object = group.get("orthogonalize", "newton_schulz")
    if function != "newton_schulz" and not callable(function):
        raise ValueError(
            "orthogonalize must be 'newton_schulz' or a function (matrices, *, newton_schulz) -> updates, "
            f"got {function!r}"
        )
    given = {"ns_coefficients": coefficients, "ns_steps": num_steps}
    if quality != "reference" and any(value != getattr(OptimizerConfig, key) for key, value in given.items()):
        raise ValueError(f"ns_quality={quality!r} chooses coefficients and steps: leave it out, or {given}")


def name_of_function(function: object) -> str:
    """The qualified name of a function, or of the class of another callable object; text is its own name."""
    if isinstance(function, str):
        return function
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _are_coefficients(value: Any) -> bool:
    return _are_numbers(value, 3) and all(math.isfinite(each) for each in value)


def _check_fused(key: str, fused: object) -> None:
    """Raise ``ValueError`` unless ``fused`` maps patterns to a number of parts, or to the sizes of the parts."""
    if not isinstance(fused, Mapping):
        raise ValueError(
            f"{key} must map patterns to parts, such as {{'*.qkv.weight': 3}}, got {fused!r}; torch's fused=True is "
            "not needed: one kernel updates what it can"
        )
    for pattern, parts in fused.items():
        sizes = parts if isinstance(parts, tuple | list) else (parts,)
        if not isinstance(pattern, str) or not sizes or any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(
                f"{key} must map patterns to a number of parts or their sizes (4096, 1024), got {pattern!r}: {parts!r}"
            )


def check_flag(key: str, value: object) -> None:
    """Raise ``ValueError`` for anything but a bool: ``"no"`` would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be True or False, got {value!r}")


def check_number(key: str, value: object) -> None:
    """Raise ``ValueError`` for what is no number, as text is none, though ``float`` would read it."""
    if not _is_number(value):
        raise ValueError(f"{key} must be a number, got {value!r}")


def check_whole(key: str, value: object, *, at_least: int, other: str = "") -> None:
    """Raise ``ValueError`` for anything but an integer of at least ``at_least``; ``other`` names what else there is."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{key} must be {other}an integer of at least {at_least}, got {value!r}")


def check_one_of(key: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ``ValueError`` for a value that is not in ``allowed``."""
    if value not in allowed:
        gone = removed(f"{key}={value!r}")
        raise ValueError(gone or f"{key} must be one of {allowed}, got {value!r}")


def join_names(names: Collection[str], most: int = 5, *, separator: str = ", ") -> str:
    """The first ``most`` of some names, and how many more there are."""
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return separator.join([*list(names)[:most], *more])


def _is_number(value: object) -> bool:
    # So do scalar tensors and NumPy's numbers.
    return hasattr(value, "__float__") and not isinstance(value, bool)


def _are_numbers(values: object, count: int) -> bool:
    return isinstance(values, tuple | list) and len(values) == count and all(map(_is_number, values))
