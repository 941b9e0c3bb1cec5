from lightning_muon.grad_sync.transports import LaunchLog


def test_bytes_of_all_launches_are_counted() -> None:
    assert LaunchLog().total_bytes == 0
    assert LaunchLog([(0, 12), (1, 30), (0, 4)], overlapped_bytes=42).total_bytes == 46
