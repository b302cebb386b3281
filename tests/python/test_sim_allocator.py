"""PyTorch's own allocators behave on the simulated card as their sources say they do on a GPU.

Each expectation names its source in PyTorch. The files, in short:
  config      c10/core/AllocatorConfig.h
  allocator   c10/cuda/CUDACachingAllocator.cpp
  host        aten/src/ATen/core/CachingHostAllocator.h
  notes       docs/source/notes/cuda.rst, "Memory management"
"""

import json
import weakref

import pytest

MIB = 2**20
KIB = 2**10

_given = []


def block(num_bytes, device="cuda:0"):
    import torch

    tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    _given.append(weakref.ref(tensor))
    return tensor


@pytest.fixture(autouse=True)
def take_blocks_back():
    """pytest keeps the frames of a failed test, whose tensors would make the next one fail too."""
    yield
    for reference in _given:
        if (tensor := reference()) is not None:
            tensor.untyped_storage().resize_(0)
    _given.clear()


def stat(name, device=0):
    import torch

    return torch.cuda.memory_stats(device)[name]


def segments(torch):
    return sorted(segment["total_size"] for segment in torch.cuda.memory_snapshot())


# ---- Sizes


@pytest.mark.parametrize("asked, given", [(1, 512), (512, 512), (513, 1024), (MIB - 1, MIB)])
def test_a_size_is_rounded_up_to_512_bytes(torch, asked, given):
    # config: kMinBlockSize; allocator: round_size.
    held = block(asked)
    assert stat("allocated_bytes.all.current") == given
    assert stat("requested_bytes.all.current") == asked
    del held


def test_up_to_1_mib_shares_segments_of_2_mib(torch):
    # config: kSmallSize, kSmallBuffer; allocator: get_pool, get_allocation_size.
    held = [block(MIB), block(MIB)]
    assert segments(torch) == [2 * MIB]
    held.append(block(512))
    assert segments(torch) == [2 * MIB, 2 * MIB]
    assert stat("reserved_bytes.small_pool.current") == 4 * MIB
    assert stat("segment.small_pool.current") == 2
    assert stat("segment.large_pool.current") == 0


@pytest.mark.parametrize("asked", [MIB + 1, 5 * MIB, 10 * MIB - 512])
def test_1_to_10_mib_takes_a_segment_of_20_mib(torch, asked):
    # config: kMinLargeAlloc, large_segment_size (before: kLargeBuffer).
    held = block(asked)
    assert segments(torch) == [20 * MIB]
    assert stat("reserved_bytes.large_pool.current") == 20 * MIB
    del held


@pytest.mark.parametrize(
    "asked, segment", [(10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB), (33 * MIB, 34 * MIB)]
)
def test_from_10_mib_a_segment_is_the_size_rounded_up_to_2_mib(torch, asked, segment):
    # config: kRoundLarge; allocator: get_allocation_size.
    held = block(asked)
    assert segments(torch) == [segment]
    del held


# ---- Splitting


def test_a_large_block_is_split_when_more_than_1_mib_would_remain(torch):
    # allocator: should_split, for the large pool `remaining > kSmallSize`.
    held = block(18 * MIB)  # an own segment
    del held
    again = block(16 * MIB)
    assert segments(torch) == [18 * MIB]
    assert stat("allocated_bytes.all.current") == 16 * MIB
    assert stat("inactive_split_bytes.all.current") == 2 * MIB
    del again


def test_a_large_block_is_not_split_when_1_mib_or_less_would_remain(torch):
    # As above: exactly kSmallSize remains.
    held = block(18 * MIB)
    del held
    again = block(17 * MIB)
    assert stat("allocated_bytes.all.current") == 18 * MIB
    assert stat("requested_bytes.all.current") == 17 * MIB
    assert stat("inactive_split_bytes.all.current") == 0
    del again


def test_a_small_block_is_split_down_to_512_bytes(torch):
    # allocator: should_split, for the small pool `remaining >= kMinBlockSize`.
    held = [block(MIB), block(MIB - 512)]
    assert stat("inactive_split_bytes.small_pool.current") == 512
    held.append(block(1))
    assert segments(torch) == [2 * MIB]
    assert stat("inactive_split_bytes.small_pool.current") == 0


def test_neighbours_that_are_free_become_one_block(torch):
    # allocator: try_merge_blocks, called by free_block.
    held = [block(5 * MIB) for _ in range(4)]
    assert segments(torch) == [20 * MIB]
    del held[1:3]
    assert stat("inactive_split.all.current") == 1
    held.clear()
    assert stat("inactive_split.all.current") == 0
    (segment,) = torch.cuda.memory_snapshot()
    assert [b["size"] for b in segment["blocks"]] == [20 * MIB]


def test_the_smallest_block_that_fits_is_taken(torch):
    # allocator: get_free_block, lower_bound in an order by size.
    large, small = block(40 * MIB), block(30 * MIB)
    addresses = large.data_ptr(), small.data_ptr()
    del large, small
    held = block(25 * MIB)
    assert held.data_ptr() == addresses[1]


# ---- Reuse


def test_a_freed_block_is_given_out_again_without_a_call_of_the_runtime(torch, sim):
    # notes: "uses a caching memory allocator to speed up memory allocations".
    held = block(12 * MIB)
    address, calls = held.data_ptr(), sim.calls("cudaMalloc")
    del held
    held = block(12 * MIB)
    assert held.data_ptr() == address
    assert sim.calls("cudaMalloc") == calls


def test_empty_cache_returns_whole_segments_only(torch, sim):
    # allocator: release_cached_blocks, which frees blocks without neighbours.
    held = [block(12 * MIB), block(5 * MIB), block(5 * MIB)]
    assert sim.counters(0).device_bytes == 32 * MIB
    del held[:2]
    torch.cuda.empty_cache()
    assert segments(torch) == [20 * MIB]
    assert sim.counters(0).device_bytes == 20 * MIB


def test_a_block_is_reused_by_its_own_stream_only(torch):
    # allocator: BlockComparator orders by stream first; get_free_block checks it.
    side = torch.cuda.Stream()
    held = block(12 * MIB)
    address = held.data_ptr()
    del held
    with torch.cuda.stream(side):
        other = block(12 * MIB)
    assert other.data_ptr() != address
    assert stat("segment.all.current") == 2
    held = block(12 * MIB)
    assert held.data_ptr() == address


def test_without_record_stream_a_block_is_reused_while_another_stream_works_on_it(torch, sim):
    # The bug that record_stream is for: torch.Tensor.record_stream's documentation.
    side = torch.cuda.Stream()
    held = block(12 * MIB)
    address = held.data_ptr()
    sim.hold(side)
    with torch.cuda.stream(side):
        held.zero_()
    del held
    again = block(12 * MIB)
    assert again.data_ptr() == address
    assert sim.pending(side) > 0
    sim.release(side)


def test_a_recorded_block_is_reused_after_the_stream_has_done_its_work(torch, sim):
    # allocator: free puts it off by insert_events; malloc looks in process_events.
    side = torch.cuda.Stream()
    held = block(12 * MIB)
    address = held.data_ptr()
    sim.hold(side)
    with torch.cuda.stream(side):
        held.zero_()
    held.record_stream(side)
    del held
    assert stat("allocated_bytes.all.current") == 0
    assert stat("active_bytes.all.current") == 12 * MIB
    meanwhile = block(12 * MIB)
    assert meanwhile.data_ptr() != address

    sim.release(side)
    side.synchronize()
    again = block(12 * MIB)
    assert again.data_ptr() == address


def test_stepping_a_held_stream_decides_when_a_recorded_block_is_free(torch, sim):
    side = torch.cuda.Stream()
    held = block(12 * MIB)
    sim.hold(side)
    with torch.cuda.stream(side):
        held.zero_()
        held.zero_()
    held.record_stream(side)
    del held
    operations = sim.pending(side)  # the two, and the event that free recorded
    assert operations >= 3
    sim.step(side, operations - 1)
    while sim.pending(side) > 1:
        pass
    block(512)  # any malloc looks at the events
    assert stat("active_bytes.large_pool.current") == 12 * MIB
    sim.step(side, 1)
    side.synchronize()
    block(512)
    assert stat("active_bytes.large_pool.current") == 0
    sim.release(side)


# ---- Out of memory


def test_cached_blocks_are_freed_and_the_allocation_retried(torch):
    # allocator: malloc's release_cached_blocks before the second alloc_block; num_alloc_retries.
    for _ in range(2):
        held = [block(400 * MIB), block(400 * MIB)]
        del held
    assert stat("reserved_bytes.all.current") == 800 * MIB
    large = block(900 * MIB)
    assert stat("num_alloc_retries") == 1
    assert stat("num_ooms") == 0
    assert segments(torch) == [900 * MIB]
    del large


def test_an_injected_failure_of_cuda_malloc_is_retried(torch, sim):
    # allocator: alloc_block takes cudaErrorMemoryAllocation (2) as a reason to retry.
    sim.fail("cudaMalloc", error=2)
    held = block(12 * MIB)
    assert stat("num_alloc_retries") == 1
    assert stat("num_ooms") == 0
    del held


def test_out_of_memory_says_what_there_is(torch, sim):
    # allocator: the message at the end of malloc; num_ooms.
    held = block(600 * MIB)
    before = sim.counters(0).failed_allocations
    with pytest.raises(torch.OutOfMemoryError) as failure:
        block(500 * MIB)
    message = str(failure.value)
    assert "Tried to allocate 500.00 MiB" in message
    assert "GPU 0 has a total capacity of 1024.00 MiB" in message or "1.00 GiB" in message
    assert "600.00 MiB is allocated by PyTorch" in message
    assert stat("num_ooms") == 1
    assert stat("num_alloc_retries") == 1
    assert sim.counters(0).failed_allocations - before == 2  # the first attempt and the retry
    del held
    assert block(900 * MIB).numel() == 900 * MIB  # as usable as before


def test_a_device_shrunk_below_what_is_in_use_only_refuses_more(torch, sim):
    held = block(100 * MIB)
    try:
        sim.set_capacity(0, 64 * MIB)
        assert torch.cuda.mem_get_info(0) == (0, 64 * MIB)
        with pytest.raises(torch.OutOfMemoryError):
            block(12 * MIB)
    finally:
        sim.set_capacity(0, 1024 * MIB)
    held.zero_()
    assert block(12 * MIB).numel() == 12 * MIB


def test_a_memory_fraction_caps_what_is_reserved(torch):
    # allocator: setMemoryFraction, and alloc_block's check against allowed_memory_maximum.
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        held = block(250 * MIB)
        with pytest.raises(torch.OutOfMemoryError, match="allowed"):
            block(12 * MIB)
        del held
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert block(500 * MIB).numel() == 500 * MIB


# ---- Settings that hold for a process, so each in its own


def run_with_config(sim_process, config, code):
    run = sim_process.run_code(
        f"""
        import json
        import torch
        MIB = 2**20
        def block(num_bytes):
            return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        def stat(name):
            return torch.cuda.memory_stats()[name]
        {code}
        """,
        "--memory=1GiB",
        PYTORCH_ALLOC_CONF=config,
        PYTORCH_CUDA_ALLOC_CONF=config,
    )
    assert run.status == 0, run.errors
    return json.loads(run.output)


def test_expandable_segments_grow_in_place_and_shrink(sim_process):
    # allocator: ExpandableSegment; cuMemMap in units of kSmallBuffer and large_segment_size.
    result = run_with_config(
        sim_process,
        "expandable_segments:True",
        """
        held = [block(30 * MIB), block(50 * MIB)]
        segment, = torch.cuda.memory_snapshot()
        grown = segment["total_size"], segment["is_expandable"]
        neighbours = held[1].data_ptr() - held[0].data_ptr()
        held[1].fill_(7)
        del held[0]
        torch.cuda.empty_cache()
        kept = stat("reserved_bytes.all.current"), held[0].float().mean().item()
        try:
            block(2000 * MIB)
            refused = False
        except torch.OutOfMemoryError:
            refused = True
        print(json.dumps([grown, neighbours, kept, refused]))
        """,
    )
    grown, neighbours, kept, refused = result
    assert grown == [80 * MIB, True]
    assert neighbours == 30 * MIB
    # 30 MiB of the first 40 are free, and only whole units of 20 MiB are given back.
    assert kept[0] <= 80 * MIB
    assert kept[1] == 7
    assert refused


def test_a_block_above_max_split_size_is_kept_for_large_requests(sim_process):
    # allocator: get_free_block and should_split; notes: max_split_size_mb.
    result = run_with_config(
        sim_process,
        "max_split_size_mb:32",
        """
        block(64 * MIB)                     # freed: an oversize block in the cache
        held = block(24 * MIB)              # does not take it
        after_small = stat("reserved_bytes.all.current")
        held = [held, block(60 * MIB)]      # takes it whole: within 20 MiB of its size
        print(json.dumps([after_small, stat("reserved_bytes.all.current"),
                          stat("allocated_bytes.all.current"), stat("max_split_size")]))
        """,
    )
    assert result == [88 * MIB, 88 * MIB, 88 * MIB, 32 * MIB]


def test_sizes_are_rounded_by_divisions_of_powers_of_two_when_asked(sim_process):
    # config: roundup_power2_divisions; notes: 1200 with 4 divisions becomes 1280.
    result = run_with_config(
        sim_process,
        "roundup_power2_divisions:4",
        """
        held = block(1200 * 1024)
        print(json.dumps(stat("allocated_bytes.all.current")))
        """,
    )
    assert result == 1280 * KIB


# ---- Snapshots and pools


def test_a_snapshot_shows_blocks_in_their_states(torch, sim):
    # torch/cuda/memory.py: memory_snapshot; allocator: snapshot.
    side = torch.cuda.Stream()
    held = [block(5 * MIB), block(6 * MIB)]
    sim.hold(side)
    with torch.cuda.stream(side):
        held[1].zero_()
    held[1].record_stream(side)
    del held[1]
    (segment,) = torch.cuda.memory_snapshot()
    assert (segment["device"], segment["segment_type"]) == (0, "large")
    assert [(b["size"], b["state"]) for b in segment["blocks"]] == [
        (5 * MIB, "active_allocated"),
        (6 * MIB, "active_pending_free"),
        (9 * MIB, "inactive"),
    ]
    sim.release(side)
    side.synchronize()


def test_a_mem_pool_has_segments_of_its_own(torch):
    # torch/cuda/memory.py: MemPool, use_mem_pool; allocator: PrivatePool.
    pool = torch.cuda.MemPool()
    outside = block(5 * MIB)
    with torch.cuda.use_mem_pool(pool):
        inside = block(5 * MIB)
    assert segments(torch) == [20 * MIB, 20 * MIB]
    (own,) = pool.snapshot()
    assert own["segment_pool_id"] == pool.id
    assert own["address"] <= inside.data_ptr() < own["address"] + own["total_size"]
    assert not own["address"] <= outside.data_ptr() < own["address"] + own["total_size"]
    del inside
    more = block(16 * MIB)  # the pool's 20 MiB are free, and not for others
    assert segments(torch) == [16 * MIB, 20 * MIB, 20 * MIB]
    del pool, more
    torch.cuda.empty_cache()
    assert segments(torch) == [20 * MIB]


# ---- Page-locked host memory


def pinned(num_bytes):
    import torch

    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def test_page_locked_sizes_are_rounded_up_to_a_power_of_two(torch, sim):
    # host: allocate, PowerOf2Ceil.
    before = sim.pinned_bytes()
    held = pinned(3 * MIB + 1)
    assert held.is_pinned()
    assert sim.pinned_bytes() - before == 4 * MIB


def test_a_freed_page_locked_block_is_kept_and_given_out_again(torch, sim):
    # host: free_list_, searched by the size rounded up.
    held = pinned(4 * MIB)
    address, calls = held.data_ptr(), sim.calls("cudaHostAlloc")
    del held
    held = pinned(3 * MIB)
    assert held.data_ptr() == address
    assert sim.calls("cudaHostAlloc") == calls


def test_a_page_locked_block_is_reused_after_its_copies_are_done(torch, sim):
    # host: record_event by copy_, and process_events in allocate.
    side = torch.cuda.Stream()
    target = block(4 * MIB)
    source = pinned(4 * MIB)
    address = source.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    sim.hold(side)
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    del source
    meanwhile = pinned(4 * MIB)
    assert meanwhile.data_ptr() != address
    sim.release(side)
    side.synchronize()
    again = pinned(4 * MIB)
    assert again.data_ptr() == address


def test_page_locked_memory_ends_at_its_limit(torch, sim):
    sim.set("pinned_limit", sim.pinned_bytes() + 8 * MIB)
    try:
        held = pinned(8 * MIB)
        with pytest.raises(RuntimeError, match="out of memory"):
            pinned(4096)
        del held
    finally:
        sim.set("pinned_limit", "none")
    assert pinned(16 * MIB).is_pinned()


# ---- Copies, the clock, several devices


@pytest.fixture
def gigabyte_links(sim):
    """Copies at 1 GB/s and without latency, so that a MB takes a millisecond."""
    kept = {key: sim.get(key) for key in ("h2d", "d2h", "copy_latency")}
    sim.set("h2d", "1GB/s")
    sim.set("d2h", "1GB/s")
    sim.set("copy_latency", "0")
    yield
    for key, value in kept.items():
        sim.set(key, value)


def test_events_measure_modelled_time(torch, gigabyte_links):
    source, target = pinned(64 * MIB), block(64 * MIB)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(64 * MIB / 1e6, rel=1e-2)


def test_copies_in_both_directions_overlap_and_in_one_direction_share(torch, gigabyte_links):
    host = [pinned(16 * MIB), pinned(16 * MIB)]
    device = [block(16 * MIB), block(16 * MIB)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def measure(*copies):
        torch.cuda.synchronize()
        begin = torch.cuda.Event(enable_timing=True)
        begin.record()
        ends = []
        for stream, (target, source) in zip(streams, copies, strict=True):
            with torch.cuda.stream(stream):
                stream.wait_event(begin)
                target.copy_(source, non_blocking=True)
                ends.append(stream.record_event(torch.cuda.Event(enable_timing=True)))
        torch.cuda.synchronize()
        return max(begin.elapsed_time(end) for end in ends)

    one = 16 * MIB / 1e6
    both_ways = measure((device[0], host[0]), (host[1], device[1]))
    one_way = measure((device[0], host[0]), (device[1], host[1]))
    assert both_ways == pytest.approx(one, rel=0.05)
    assert one_way == pytest.approx(2 * one, rel=0.05)


def test_pageable_copies_make_the_host_wait(torch, sim):
    # CUDA runtime API, "API synchronization behavior": memcpy.
    target = block(4 * MIB)
    torch.cuda.synchronize()
    before = sim.counters(0)
    target.copy_(torch.empty(4 * MIB, dtype=torch.uint8), non_blocking=True)
    after = sim.counters(0)
    assert after.h2d.pageable_bytes - before.h2d.pageable_bytes == 4 * MIB
    assert after.host_syncs - before.host_syncs == 1

    target.copy_(pinned(4 * MIB), non_blocking=True)
    last = sim.counters(0)
    assert last.h2d.bytes - after.h2d.bytes == 4 * MIB
    assert last.h2d.pageable_bytes == after.h2d.pageable_bytes
    assert last.host_syncs == after.host_syncs


def test_devices_have_memory_of_their_own(torch, sim):
    held = [block(900 * MIB, "cuda:0"), block(900 * MIB, "cuda:1")]
    assert [stat("reserved_bytes.all.current", d) for d in range(2)] == [900 * MIB] * 2
    with pytest.raises(torch.OutOfMemoryError, match="GPU 1"):
        block(200 * MIB, "cuda:1")
    assert (stat("num_ooms", 0), stat("num_ooms", 1)) == (0, 1)
    del held


def test_a_copy_between_devices_goes_over_the_peer_engine(torch, sim):
    # aten/src/ATen/native/cuda/Copy.cu: copy_device_to_device.
    source = torch.arange(MIB, dtype=torch.int32).to("cuda:0")
    torch.cuda.synchronize(0)
    before = sim.counters().peer
    target = source.to("cuda:1")
    assert torch.equal(target.cpu(), torch.arange(MIB, dtype=torch.int32))
    after = sim.counters().peer
    assert after.bytes - before.bytes == 4 * MIB
    assert after.count - before.count == 1
    assert torch.cuda.can_device_access_peer(0, 1)


def test_a_timeline_shows_the_operations(torch, sim, tmp_path):
    with sim.timeline(tmp_path / "timeline.json"):
        block(MIB).copy_(pinned(MIB), non_blocking=True)
        torch.cuda.synchronize()
    trace = json.loads((tmp_path / "timeline.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert any(event.get("ph") == "X" and event.get("dur", 0) > 0 for event in events)


# ---- Refusals


@pytest.mark.parametrize(
    "key, value", [("memory", "lots"), ("h2d", "55"), ("colour", "red"), ("devices", "0")]
)
def test_a_setting_that_is_refused_changes_nothing(sim, torch, key, value):
    with pytest.raises(sim.SimulationError) as refusal:
        sim.set(key, value)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value)


def test_an_unknown_setting_has_no_value(sim, torch):
    with pytest.raises(sim.SimulationError, match="colour"):
        sim.get("colour")
