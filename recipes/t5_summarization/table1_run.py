"""``python -m recipes.t5_summarization.table1_run --row k8 --seed 0``: one training of the table.

Lightning's launcher runs the same command once more for every further rank; started by torchrun or a scheduler on each
rank, it joins the others. Rank 0 appends the result to ``results.jsonl``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from recipes.t5_summarization.demo import set_environment
from recipes.t5_summarization.table1_config import add_arguments, load_grid
from recipes.t5_summarization.table1_results import RESULTS, append_result


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of every rank.

    Args:
        arguments: None takes them from the command line.
    """
    parser = argparse.ArgumentParser(description="Train one row of the table with one seed.")
    add_arguments(parser)
    parser.add_argument("--row", required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    grid = load_grid(options, rows=[options.row])
    set_environment()
    from recipes.t5_summarization.table1_fit import fit  # after the environment is set: it imports torch

    result, is_rank_zero = fit(grid.run(options.row, options.seed))
    if is_rank_zero:
        append_result(grid.output_dir / RESULTS, result)


if __name__ == "__main__":
    main()
