"""``python -m recipes.t5_summarization.demo``: train the small T5 on this machine and report.

The command line takes the options of LightningCLI, for instance ``--trainer.max_epochs 1``. Lightning's launcher runs
the same command once more for every further rank.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

CONFIG = Path(__file__).with_name("demo.yaml")


def set_environment() -> None:
    """One thread per rank: 4 ranks share the cores. Before torch is imported; the launched ranks inherit it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A tokenizer that has used threads warns at every later fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Of the versions of jsonargparse and torch's pytree that Lightning calls: nothing a user of the demo can change.
    warnings.filterwarnings("ignore", message=".*deprecated", category=Warning, module="lightning")


def run(arguments: list[str] | None = None) -> None:
    """Fit and, on rank 0, print the report. Every rank runs it.

    Args:
        arguments: Options that override demo.yaml; None takes them from the command line.
    """
    from lightning.pytorch.cli import LightningCLI

    import lightning_muon  # noqa: F401  registers the strategies for `--trainer.strategy parallel_muon`
    from recipes.t5_summarization.report import History

    history = History()
    cli = LightningCLI(
        args=arguments,
        run=False,
        parser_kwargs={"default_config_files": [str(CONFIG)]},
        trainer_defaults={"callbacks": [history]},
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    if cli.trainer.is_global_zero:
        print(report(cli, history), flush=True)


def report(cli: LightningCLI, history: object) -> str:
    """Draw the plot and return the text of the report."""
    from recipes.t5_summarization.metrics import unigram_entropy
    from recipes.t5_summarization.plot import plot_losses
    from recipes.t5_summarization.report import full_report

    data, folder = cli.datamodule, Path(cli.trainer.logger.log_dir)
    unigram = unigram_entropy(
        (example["target"] for example in data.train),
        (example["target"] for example in data.validation),
        len(data.tokenizer),
    )
    paths = {
        "checkpoint": Path(cli.trainer.checkpoint_callback.best_model_path),
        "CSV log": folder / "metrics.csv",
        "plot": folder / "loss.png",
    }
    plot_losses(paths["CSV log"], paths["plot"], untrained=history.untrained_loss, unigram=unigram)
    return full_report(history, unigram=unigram, summaries=cli.model.summaries, paths=paths)


def main() -> None:
    """Entry point of every rank."""
    set_environment()
    # The root logger stays without a handler: with one, Lightning's own messages would appear twice.
    log = logging.getLogger("recipes")
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    run()


if __name__ == "__main__":
    main()
