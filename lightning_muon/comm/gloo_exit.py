"""A clean end of processes that used gloo."""

from __future__ import annotations

import atexit
import time
from functools import cache


@cache
def let_gloo_finish_at_exit() -> None:
    """Give gloo's threads the interpreter lock once more before it goes; call it before the first collective.

    A thread that has finished a collective drops its handle a moment after the waiting rank is told. If that is the
    last reference it must take the interpreter lock, and while the interpreter exits that ends the process by SIGABRT
    (seen in one exit of two with torch 2.13, four ranks on two cores; in none of 16 with this).
    """
    atexit.register(time.sleep, 0.1)
