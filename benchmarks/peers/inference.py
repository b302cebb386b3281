"""Systems that run a model whose weights stay on the host: `attach` returns what is called."""

import tempfile
from collections.abc import Callable

import torch
from models import weight_bytes
from torch import nn

DEVICE = torch.device("cuda:0")
FLEXTENSOR_NAME = "peers"

# Of diffusers: leaf or block level, and which of use_stream, record_stream, low_cpu_mem_usage.
DIFFUSERS = {
    f"diffusers_{level}{''.join(flags)}": (level, flags)
    for level in ("leaf", "block")
    for flags in ((), ("_stream",), ("_stream", "_record"), ("_stream", "_low"),
                  ("_stream", "_record", "_low"))
}  # fmt: skip

SYSTEMS = [
    "plain",
    "accelerate_cpu",
    "accelerate_dispatch",
    "accelerate_disk",
    *DIFFUSERS,
    "diffusers_block_stream_disk",
    "flextensor_latency",
    "flextensor_memory",
    "flextensor_memory_register",
    "flextensor_strategy",
    "fsdp_offload",
]


def warm_ups(system: str) -> int:
    # FlexTensor profiles and plans in its first passes.
    return 8 if system.startswith("flextensor") else 2


def attach(system: str, model: nn.Module, folder: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if system == "plain":
        return model.to(DEVICE)
    library = system.partition("_")[0]
    if library == "accelerate":
        return _accelerate(system, model, folder)
    if library == "diffusers":
        return _diffusers(system, model, folder)
    if library == "flextensor":
        return _flextensor(system, model)
    if library == "fsdp":
        shard(model, offload=True, pin_memory=True)
        return model
    raise KeyError(system)


def _accelerate(system: str, model: nn.Module, folder: str):
    import accelerate

    if system == "accelerate_cpu":
        return accelerate.cpu_offload(model, execution_device=DEVICE, offload_buffers=True)
    if system == "accelerate_disk":
        return accelerate.disk_offload(
            model, tempfile.mkdtemp(dir=folder), execution_device=DEVICE, offload_buffers=True
        )
    device_map = accelerate.infer_auto_device_map(
        model,
        max_memory={0: weight_bytes(model) // 4, "cpu": 8 << 30},
        no_split_module_classes=[type(model.layers[0]).__name__],
    )
    return accelerate.dispatch_model(model, device_map, offload_buffers=True, force_hooks=True)


def _diffusers(system: str, model: nn.Module, folder: str):
    from diffusers.hooks import apply_group_offloading

    extra = {}
    if system == "diffusers_block_stream_disk":
        level, flags = "block", ("_stream",)
        extra["offload_to_disk_path"] = tempfile.mkdtemp(dir=folder)
    else:
        level, flags = DIFFUSERS[system]
    apply_group_offloading(
        model,
        onload_device=DEVICE,
        offload_device=torch.device("cpu"),
        offload_type=f"{level}_level",
        num_blocks_per_group=1 if level == "block" else None,
        use_stream="_stream" in flags,
        record_stream="_record" in flags,
        low_cpu_mem_usage="_low" in flags,
        **extra,
    )
    return model


def _flextensor(system: str, model: nn.Module):
    import flextensor

    options = {"include_patterns": ["layers.*"], "profiling_iters": 2, "profile_mode": "getter"}
    if system != "flextensor_latency":
        card_bytes = torch.cuda.get_device_properties(DEVICE).total_memory
        options["max_gpu_mem_fraction"] = 0.45 * weight_bytes(model) / card_bytes
    if system.startswith("flextensor_memory"):
        options.update(num_blocks=2, min_blocks=2)
    if system == "flextensor_memory_register":
        options["pinned_memory_mode"] = "host_register"
    if system == "flextensor_strategy":
        options["transfer_mode"] = "strategy"
    config = flextensor.OffloadConfig(**options)
    offloaded = flextensor.offload(model, config=config, name=FLEXTENSOR_NAME)
    for name, child in model.named_children():
        if name != "layers":
            child.to(DEVICE)
    return offloaded


def shard(model: nn.Module, *, offload: bool, pin_memory: bool = False) -> None:
    """Shards each layer and the rest with FSDP2, over the process group that there is or over one
    rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    if not dist.is_initialized():
        # NCCL needs a real card: it has the CUDA runtime linked into it.
        dist.init_process_group("cpu:gloo,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    if offload:
        policy = CPUOffloadPolicy(pin_memory=pin_memory)
    else:
        policy = OffloadPolicy()
        model.to(torch.device("cuda", torch.cuda.current_device()))
    for block in model.layers:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
