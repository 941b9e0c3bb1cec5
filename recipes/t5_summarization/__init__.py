"""T5 learns to summarize: docstrings of the installed packages, or WikiHow."""
