from lightning_muon.grad_sync.transport import Traffic


def test_bytes_of_all_launches_are_counted() -> None:
    assert Traffic().total_bytes == 0
    assert Traffic([(0, 12), (1, 30), (0, 4)], overlapped_bytes=42).total_bytes == 46
