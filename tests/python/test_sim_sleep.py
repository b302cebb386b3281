"""torch.cuda._sleep, which tests of streams use to keep a stream busy."""

import pytest


@pytest.fixture
def h200(sim, torch):
    sim.set("card", "h200")
    before = sim.get("launch")
    sim.set("launch", "0")
    yield sim
    sim.set("launch", before)


def test_a_sleep_takes_its_cycles_on_the_virtual_clock(torch, h200):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(1_980_000)  # a millisecond at 1.98 GHz
    end.record()
    assert not end.query()
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(1.0, rel=0.05)


def test_a_sleep_keeps_its_own_stream_busy(torch, h200):
    side = torch.cuda.Stream()
    kernels = h200.counters().kernels
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_980_000_000)
    assert not side.query()
    assert torch.cuda.default_stream().query()
    before = h200.now_ns()
    side.synchronize()
    assert h200.now_ns() - before == pytest.approx(1e9, rel=0.01)
    assert h200.counters().kernels == kernels + 1
