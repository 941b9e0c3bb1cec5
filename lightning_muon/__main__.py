"""``python -m lightning_muon``: the command line, for ``torchrun -m lightning_muon doctor``."""

from lightning_muon.cli.main import main

if __name__ == "__main__":
    main()
