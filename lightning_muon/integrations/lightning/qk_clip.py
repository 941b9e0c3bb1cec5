"""The callback ``QKClip``: bounds attention logits behind each optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_muon.config import check_whole
from lightning_muon.engine.options import Options
from lightning_muon.engine.qk_clip import QKClipper
from lightning_muon.integrations.strategy import MuonStrategy


class QKClipCallback:
    """Scales down, after each optimizer step, queries and keys of the heads whose logits have exceeded a threshold.

    With ``S_max`` the largest logit of a head in the forward passes of the step, over all ranks and micro-batches, and
    ``gamma = min(1, threshold / S_max)``, rows of query and key projections, biases too, are multiplied by
    ``sqrt(gamma)`` each; where query heads share a key, the query by ``gamma``. The largest logit is logged as
    ``max_attention_logit``. For pretraining without norms of queries and keys; see docs/family.md.

    Its base classes are this one, and the ``Callback`` of one Lightning package.

    Args:
        threshold: The largest logit that is left alone, ``tau``; ``math.inf`` only logs.
        every_n_steps: Measure and clip in every n-th optimizer step; the others cost nothing.
        projections: Shell patterns of module names -> what makes queries and keys there: the names of two layers or
            parameters ``(query, key)``; ``(name, "blocks")`` for one that makes all queries, then all keys, then all
            values, or ``(name, "heads")`` for one that does so head by head; ``None`` leaves a module alone. For
            modules whose names are not the usual ones.

    Source: Kimi Team 2025, Kimi K2, arXiv:2507.20534, Algorithm 1.

    Example::

        trainer = Trainer(strategy="parallel_muon", callbacks=[QKClip()])
        trainer.fit(model)
    """

    def __init__(
        self,
        threshold: float = 100.0,
        *,
        every_n_steps: int = 1,
        projections: Mapping[str, tuple[str, str] | None] | None = None,
    ) -> None:
        if not threshold > 0:
            raise ValueError(f"QKClip(threshold={threshold}): a logit larger than 0; Kimi K2 takes 100")
        check_whole("every_n_steps", every_n_steps, at_least=1)
        self.threshold, self.every_n_steps = threshold, every_n_steps
        self.projections = dict(projections or {})
        for pattern, names in self.projections.items():
            is_pair = isinstance(names, tuple | list) and len(names) == 2 and all(isinstance(n, str) for n in names)
            if names is not None and not is_pair:
                raise ValueError(
                    f"QKClip(projections): {pattern!r} must have the names of a query and a key projection, such as "
                    f"('wq', 'wk'), or None, got {names!r}"
                )
        self._clipper: QKClipper | None = None

    def setup(self, trainer: Any, *_: Any, stage: str, **__: Any) -> None:
        """Refuse a strategy that this does not go with; local, the same on all ranks."""
        strategy = trainer.strategy
        if stage != "fit":
            return
        if not isinstance(strategy, MuonStrategy):
            raise ValueError(
                f"QKClip needs strategy='parallel_muon' (or a ParallelMuonStrategy), got {type(strategy).__name__}"
            )
        for problem in _problems(strategy.options):
            raise ValueError(f"QKClip does not work with {problem}")

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Find the attention modules; local, the same on all ranks."""
        self._clipper = QKClipper(
            trainer.precision_plugin.engine,
            self.projections,
            threshold=self.threshold,
            is_measured=lambda: trainer.training and trainer.global_step % self.every_n_steps == 0,
            log=lambda largest: module.log("max_attention_logit", largest),
        )

    def on_fit_end(self, *_: Any) -> None:
        """Observe no more."""
        if self._clipper is not None:
            self._clipper.close()
            self._clipper = None

    def on_exception(self, *_: Any) -> None:
        """Observe no more."""
        self.on_fit_end()


def _problems(options: Options) -> list[str]:
    """Options that QKClip does not go with, and why."""
    found: list[str] = []
    if options.pipeline_size > 1:
        found.append(f"pipeline_size={options.pipeline_size}: stages run their layers without calls of the whole model")
    if options.context_size > 1:
        found.append(f"context_size={options.context_size}: a rank sees the logits of a part of the keys only")
    if options.early_all_gather:
        found.append("early_all_gather=True: the next forward may gather weights before they are clipped")
    if options.has_nodes:
        found.append("FlexDeMo: its largest logits would travel between the nodes in each step")
    return found
