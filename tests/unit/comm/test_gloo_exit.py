"""The registration is made once."""

from __future__ import annotations

from unittest import mock

from lightning_muon.comm import gloo_exit


def test_the_wait_is_registered_once() -> None:
    gloo_exit.let_gloo_finish_at_exit.cache_clear()
    with mock.patch.object(gloo_exit.atexit, "register") as register:
        gloo_exit.let_gloo_finish_at_exit()
        gloo_exit.let_gloo_finish_at_exit()
    gloo_exit.let_gloo_finish_at_exit.cache_clear()
    assert register.call_count == 1
