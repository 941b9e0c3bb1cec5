"""The optimizer that the user made, after another one has taken its place."""

from __future__ import annotations

from typing import Any

import torch


class Handle:
    """Lets the given optimizer go on as a handle on the learning rates of the one that does the work.

    Schedulers that were made before the optimizer was set up hold the given one, and nobody knows of them. So it shares
    its param groups with the other one, and takes a step without parameters whenever that one has stepped, by which
    schedulers see that they are called in the right order. Stepping it by itself is an error.

    Args:
        given: The optimizer of the user; takes part in no step any more.
        used: The one that has taken its place.
    """

    def __init__(self, given: torch.optim.Optimizer, used: torch.optim.Optimizer) -> None:
        self.given, self.used = given, used
        self._is_following = False
        given.register_step_pre_hook(self._refuse)
        # Loading a state makes new groups.
        used.register_load_state_dict_post_hook(self._share)
        self._share()

    def follow(self) -> None:
        """The other optimizer has stepped; local."""
        self.given.param_groups, self._is_following = [], True
        try:
            self.given.step()
        finally:
            self._is_following = False
            self._share()

    def _share(self, *_: Any) -> None:
        self.given.param_groups = self.used.param_groups

    def _refuse(self, *_: Any) -> None:
        if not self._is_following:
            raise RuntimeError(
                f"this {type(self.given).__name__} does nothing any more: a {type(self.used).__name__} has taken its "
                "place; step the one that setup (prepare) has returned"
            )
