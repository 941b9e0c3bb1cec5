from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace

from lightning_muon.monitor.positions import ProcessIdentity, _state_and_start


def test_a_running_process_is_not_gone_and_travels_as_text() -> None:
    own = ProcessIdentity.current()
    assert own.pid == os.getpid()
    assert own.is_on_this_host and not own.is_gone()
    assert ProcessIdentity.from_text(own.to_text()) == own


def test_a_killed_process_is_gone_before_its_parent_has_looked() -> None:
    child = subprocess.Popen(["sleep", "60"])
    identity = replace(ProcessIdentity.current(), pid=child.pid, start=_state_and_start(child.pid)[1])
    os.kill(child.pid, signal.SIGSTOP)
    assert not identity.is_gone()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert identity.is_gone()
    child.wait()
    assert identity.is_gone()


def test_another_process_of_the_same_number_is_another_one() -> None:
    assert replace(ProcessIdentity.current(), start="1").is_gone()


def test_processes_of_other_hosts_cannot_be_seen() -> None:
    assert not replace(ProcessIdentity.current(), host="another/pid:[1]").is_on_this_host
    assert not ProcessIdentity("", 7, "").is_on_this_host
    assert ProcessIdentity.from_text(ProcessIdentity("", 7, "").to_text()) == ProcessIdentity("", 7, "")
