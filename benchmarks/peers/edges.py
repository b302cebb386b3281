"""What systems do at the edge of what they promise: one function for each situation.

An edge is "right" when the card gives what the CPU gives and nothing is lost, "wrong" when it does
not and nobody says so, "refused" when an exception says so, clear or not. What comes out is
observed, never expected: a table of outcomes and no test.
"""

import contextlib
import copy
import gc
import importlib
import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import inference
import torch
import training
from inference import DEVICE
from models import Block, Net, cpu_state, weight_bytes
from torch import nn
from torch.nn import functional as F
from torch_residency import sim

INFERENCE_SYSTEMS = [
    "plain",
    "accelerate_cpu",
    "accelerate_dispatch",
    "accelerate_disk",
    "diffusers_leaf",
    "diffusers_leaf_stream",
    "diffusers_leaf_stream_record_low",
    "diffusers_block",
    "diffusers_block_stream",
    "flextensor_memory",
    "flextensor_strategy",
    "fsdp_offload",
]
TRAINING_SYSTEMS = [
    "plain",
    "checkpoint",
    "save_on_cpu_pinned",
    "save_on_cpu_pageable",
    "fsdp_offload",
    "torchao",
    "torchao_gradients",
    "deepspeed_zero2",
]

WIDTH = 512
LAYERS = 12
BATCH = 8
EDGE_TIMEOUT_S = 90
TOLERANCE = 1e-4
MEAN_TOLERANCE = 1e-6  # of weights after training
LEARNING_RATE = 0.1  # of the plain gradient descent in `backward`
MIB = 2**20


# ---- Models: each function returns one, and an input


class GreedyLinear(nn.Linear):
    """Asks for more than the card has, while it is armed."""

    armed = False  # of the class: some systems run a copy of the model

    def forward(self, x):
        if GreedyLinear.armed:
            torch.empty(1 << 40, dtype=torch.uint8, device=x.device)
        return super().forward(x)


class CountingBlock(Block):
    """Counts its passes twice, in place and by assignment, and computes with the first count."""

    def __init__(self, width: int):
        super().__init__(width)
        self.register_buffer("passes", torch.zeros(1))
        self.register_buffer("assigned", torch.zeros(1))
        self.register_buffer("scale", torch.rand(width), persistent=False)

    def forward(self, x):
        self.passes.add_(1)
        self.assigned = self.assigned + 1
        return super().forward(x) * (self.scale + 1 / self.passes)


# Strides of weights inside a pass, by type of device. A hook would look too early or too late.
SEEN_STRIDES: dict[str, set[tuple[int, ...]]] = {}


def note_stride(weight: torch.Tensor, x: torch.Tensor) -> None:
    SEEN_STRIDES.setdefault(x.device.type, set()).add(tuple(weight.stride()))


class NotingConv2d(nn.Conv2d):
    def forward(self, x):
        note_stride(self.weight, x)
        return super().forward(x)


class StridedLinear(nn.Module):
    """Its weight has gaps in memory, or is the transposed window of a larger storage."""

    def __init__(self, width: int, *, gaps: bool):
        super().__init__()
        storage = torch.randn(width, 2 * width) / width**0.5
        self.weight = nn.Parameter(storage[:, ::2] if gaps else storage[:, :width].t())

    def forward(self, x):
        note_stride(self.weight, x)
        return torch.tanh(F.linear(x, self.weight))


class Chain(nn.Module):
    """Layers and a head, as in `Net`."""

    def __init__(self, layers: list[nn.Module], head: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = head

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


def plain_model():
    model = Net(WIDTH, LAYERS)
    model.layers[LAYERS // 2].fc = GreedyLinear(WIDTH, WIDTH)
    return model, torch.randn(BATCH, WIDTH)


def tied_model():
    model = Net(WIDTH, LAYERS)
    model.head.weight = model.layers[0].fc.weight
    return model, torch.randn(BATCH, WIDTH)


def counting_model():
    model = Net(WIDTH, LAYERS)
    model.layers = nn.ModuleList(CountingBlock(WIDTH) for _ in range(LAYERS))
    return model, torch.randn(BATCH, WIDTH)


def channels_last_model():
    channels = 16
    layers = [NotingConv2d(channels, channels, 3, padding=1) for _ in range(LAYERS)]
    model = Chain(layers, NotingConv2d(channels, 4, 3)).to(memory_format=torch.channels_last)
    images = torch.randn(4, channels, 12, 12)
    return model, images.to(memory_format=torch.channels_last)


def strided_model():
    layers = [StridedLinear(WIDTH, gaps=i % 2 == 0) for i in range(LAYERS)]
    return Chain(layers, nn.Linear(WIDTH, WIDTH)), torch.randn(BATCH, WIDTH)


# ---- What is found


def difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    if ours.device.type == "meta":
        return float("inf")
    return (ours.detach().cpu().double() - reference.detach().double()).abs().max().item()


@dataclass
class Findings:
    """What is wrong, and what else is worth saying."""

    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def expect(self, condition: bool, fault: str) -> None:
        if not condition:
            self.faults.append(fault)

    def equal(self, what: str, ours: torch.Tensor, reference: torch.Tensor) -> bool:
        if ours.device.type == "meta":
            self.faults.append(f"{what} has no data")
            return False
        off_by = difference(ours, reference)
        self.expect(off_by <= TOLERANCE, f"{what} off by {off_by:.2g}")  # and when it is nan
        return off_by <= TOLERANCE

    def equal_states(self, what: str, ours: dict, reference: dict) -> None:
        lost = [name for name in reference if name not in ours or ours[name].device.type == "meta"]
        rest = [difference(ours[name], reference[name]) for name in reference if name not in lost]
        self.expect(not lost, f"{what}: {len(lost)} of {len(reference)} without data")
        self.expect(
            all(value <= TOLERANCE for value in rest), f"{what} off by {max(rest, default=0):.2g}"
        )


class NotOffered(RuntimeError):
    """The system has no interface for it."""


# ---- Inference


class Offloaded:
    """A model under a system, and the same model on the CPU."""

    def __init__(self, system: str, make: Callable, folder: str):
        self.system = system
        self.folder = folder
        self.model, self.cpu_input = make()
        self.model.eval()
        self.reference = copy.deepcopy(self.model)
        self.input = self.cpu_input.to(DEVICE)
        self.attach()

    def attach(self) -> None:
        self.run = inference.attach(self.system, self.model, self.folder)

    def warm_up(self) -> None:
        for _ in range(inference.warm_ups(self.system)):
            self.run(self.input)
        self.settle()

    def settle(self) -> None:
        torch.cuda.synchronize()
        gc.collect()

    def output(self) -> torch.Tensor:
        return self.run(self.input).cpu()

    def expected(self) -> torch.Tensor:
        return self.reference(self.cpu_input)

    def allocated(self) -> int:
        self.settle()
        return torch.cuda.memory_allocated()

    def detach(self) -> None:
        """Takes the system off the model, or raises NotOffered."""
        library = self.system.partition("_")[0]
        if library == "plain":
            self.model.to("cpu")
        elif library == "accelerate":
            from accelerate.hooks import remove_hook_from_submodules

            remove_hook_from_submodules(self.run)
        elif library == "diffusers":
            # No public way: what its own pipelines do.
            from diffusers.hooks import HookRegistry

            registry = HookRegistry.check_if_exists_or_initialize(self.model)
            for hook in ("group_offloading", "layer_execution_tracker",
                         "lazy_prefetch_group_offloading"):  # fmt: skip
                registry.remove_hook(hook, recurse=True)
        elif library == "flextensor":
            import flextensor

            flextensor.release(inference.FLEXTENSOR_NAME)
        else:
            raise NotOffered("no interface to remove it")
        self.settle()


@torch.no_grad()
def tied_weights(system: str, folder: str, findings: Findings) -> None:
    subject = Offloaded(system, tied_model, folder)
    subject.warm_up()
    before = sim.counters().h2d.bytes
    output = subject.output()
    copied = sim.counters().h2d.bytes - before
    findings.equal("output", output, subject.expected())
    weights = weight_bytes(subject.reference)
    if copied > weights:
        findings.notes.append(f"copies {copied / MIB:.1f} of {weights / MIB:.1f} MiB a pass")
    with contextlib.suppress(NotOffered):
        subject.detach()
    kept = subject.model.head.weight is subject.model.layers[0].fc.weight
    findings.expect(kept, "tie broken")


@torch.no_grad()
def changed_buffers(system: str, folder: str, findings: Findings) -> None:
    subject = Offloaded(system, counting_model, folder)
    for _ in range(inference.warm_ups(system)):
        output, expected = subject.output(), subject.expected()
    findings.equal("output", output, expected)
    with contextlib.suppress(NotOffered):
        subject.detach()
    layer, reference = subject.model.layers[2], subject.reference.layers[2]
    findings.equal("buffer changed in place", layer.passes, reference.passes)
    findings.equal("assigned buffer", layer.assigned, reference.assigned)


def _strides(system: str, make: Callable, folder: str, findings: Findings) -> None:
    subject = Offloaded(system, make, folder)
    subject.warm_up()
    findings.equal("output", subject.output(), subject.expected())
    _expect_same_strides(findings)
    with contextlib.suppress(NotOffered):
        subject.detach()
        strides = [p.stride() for p in subject.model.parameters()]
        kept = strides == [p.stride() for p in subject.reference.parameters()]
        if not kept:
            findings.notes.append("strides differ after removal")


def _expect_same_strides(findings: Findings) -> None:
    if "cuda" not in SEEN_STRIDES:
        findings.notes.append("ran on the CPU")
    elif SEEN_STRIDES["cuda"] != SEEN_STRIDES["cpu"]:
        findings.faults.append("strides of weights differ in a pass")


@torch.no_grad()
def channels_last(system: str, folder: str, findings: Findings) -> None:
    _strides(system, channels_last_model, folder, findings)


@torch.no_grad()
def strided_weights(system: str, folder: str, findings: Findings) -> None:
    _strides(system, strided_model, folder, findings)


def backward(system: str, folder: str, findings: Findings) -> None:
    subject = Offloaded(system, plain_model, folder)
    with torch.no_grad():
        subject.warm_up()
    target = torch.randn(BATCH, WIDTH)
    loss = F.mse_loss(subject.run(subject.input), target.to(DEVICE))
    loss.backward()
    reference_loss = F.mse_loss(subject.expected(), target)
    reference_loss.backward()
    findings.equal("loss", loss, reference_loss)

    gradients = {}
    for name, parameter in subject.model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            gradients[name] = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    expected = {name: p.grad for name, p in subject.reference.named_parameters()}
    findings.equal_states("gradients", gradients, expected)

    for model in (subject.model, subject.reference):
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    with torch.no_grad():
        findings.equal("output after a step", subject.output(), subject.expected())


@torch.no_grad()
def out_of_memory(system: str, folder: str, findings: Findings) -> None:
    """An activation does not fit in the middle of a pass."""
    subject = Offloaded(system, plain_model, folder)
    subject.warm_up()
    at_rest = subject.allocated()
    GreedyLinear.armed = True
    try:
        subject.output()
        findings.faults.append("did not run out of memory")
    except torch.OutOfMemoryError:
        pass
    finally:
        GreedyLinear.armed = False
    _expect_retry(subject, at_rest, findings)


@torch.no_grad()
def full_card(system: str, folder: str, findings: Findings) -> None:
    """The card is full when the weights come."""
    subject = Offloaded(system, plain_model, folder)
    subject.warm_up()
    at_rest = subject.allocated()
    torch.cuda.empty_cache()
    capacity = int(sim.get("memory"))
    sim.set_capacity(0, sim.counters(0).device_bytes)
    fill = []
    for size in (256 << 10, 512):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                fill.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
    try:
        findings.equal("output", subject.output(), subject.expected())
        findings.notes.append("needs no memory")
    except torch.OutOfMemoryError:
        pass
    finally:
        sim.set_capacity(0, capacity)
        fill.clear()
    _expect_retry(subject, at_rest, findings)


def _expect_retry(subject: Offloaded, at_rest: int, findings: Findings) -> None:
    if held := subject.allocated() - at_rest:
        findings.notes.append(f"{held / MIB:.1f} MiB held until the next pass")
    findings.equal("output of the retry", subject.output(), subject.expected())
    left = subject.allocated() - at_rest
    findings.expect(left <= 0, f"{left / MIB:.1f} MiB leaked")


@torch.no_grad()
def attached_twice(system: str, folder: str, findings: Findings) -> None:
    subject = Offloaded(system, plain_model, folder)
    subject.warm_up()
    try:
        subject.attach()
    except Exception:
        with contextlib.suppress(Exception):
            if findings.equal("output after it", subject.output(), subject.expected()):
                findings.notes.append("works on")
        raise
    subject.warm_up()
    findings.equal("output", subject.output(), subject.expected())


@torch.no_grad()
def two_threads(system: str, folder: str, findings: Findings) -> None:
    subject = Offloaded(system, plain_model, folder)
    subject.warm_up()
    expected = subject.expected()
    outputs, errors = [], []

    @torch.no_grad()  # of the thread, as it is of the caller
    def work() -> None:
        try:
            outputs.extend(subject.output() for _ in range(3))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    off_by = max((difference(output, expected) for output in outputs), default=0)
    findings.expect(off_by <= TOLERANCE, f"an output off by {off_by:.2g}")
    if errors:
        raise errors[0]


@torch.no_grad()
def removed(system: str, folder: str, findings: Findings) -> None:
    subject = Offloaded(system, plain_model, folder)
    subject.warm_up()
    pinned = sim.pinned_bytes()
    subject.detach()
    torch._C._host_emptyCache()
    places = {p.device.type for p in subject.model.parameters()}
    findings.equal_states("weights", subject.model.state_dict(), subject.reference.state_dict())
    if places != {"cpu"}:
        findings.notes.append("weights on " + " and ".join(sorted(places)))
    if pinned and (left := sim.pinned_bytes()):
        findings.notes.append(f"{left / MIB:.1f} of {pinned / MIB:.1f} MiB still page-locked")
    subject.model.to("cpu")
    findings.equal("output on the CPU", subject.model(subject.cpu_input), subject.expected())
    subject.model.to(DEVICE)
    findings.equal("output on the card", subject.model(subject.input), subject.expected())


@torch.no_grad()
def reloaded(system: str, folder: str, findings: Findings) -> None:
    subject = Offloaded(system, plain_model, folder)
    subject.warm_up()
    old_output = subject.expected()
    state = {name: 1.5 * value for name, value in subject.reference.state_dict().items()}
    subject.reference.load_state_dict(state)
    loaded = {name: value.clone() for name, value in state.items()}
    if system.startswith("fsdp"):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        subject.model.reshard()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        set_model_state_dict(subject.model, loaded, options=options)
    else:
        subject.run.load_state_dict(loaded)
    subject.warm_up()
    output = subject.output()
    if not findings.equal("output", output, subject.expected()):
        if difference(output, old_output) <= TOLERANCE:
            findings.notes.append("the old weights are used")
    own = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in subject.run.state_dict().items()
    }
    findings.equal_states("state dict", own, state)


# ---- Training


class Trained:
    """A model that a system trains, and the same model on the CPU."""

    def __init__(self, system: str, make: Callable):
        self.system = system
        self.model, self.cpu_input = make()
        self.reference = copy.deepcopy(self.model)
        with torch.no_grad():
            self.cpu_target = torch.randn_like(copy.deepcopy(self.model)(self.cpu_input))
        self.input, self.target = self.cpu_input.to(DEVICE), self.cpu_target.to(DEVICE)
        self.attach()

    def attach(self) -> None:
        self._reference_step = training.trainer("cpu", self.reference)
        self._step = training.trainer(self.system, self.model)

    def step(self, **options) -> None:
        self._step(self.input, self.target, **options)
        self._reference_step(self.cpu_input, self.cpu_target, **options)
        torch.cuda.synchronize()

    def expect_equal(self, what: str, findings: Findings) -> None:
        """Compares in the mean: where a gradient is next to nothing, Adam makes a step of full size
        out of the rounding."""
        ours = training.weights(self.system, self.model)
        off_by = max(
            (ours[name].double() - value.double()).abs().mean().item()
            for name, value in cpu_state(self.reference).items()
        )
        findings.expect(off_by <= MEAN_TOLERANCE, f"{what} off by {off_by:.2g} in the mean")


def training_tied_weights(system: str, folder: str, findings: Findings) -> None:
    subject = Trained(system, tied_model)
    for _ in range(3):
        subject.step()
    subject.expect_equal("weights", findings)
    kept = subject.model.head.weight is subject.model.layers[0].fc.weight
    findings.expect(kept, "tie broken")


def training_changed_buffers(system: str, folder: str, findings: Findings) -> None:
    subject = Trained(system, counting_model)
    for _ in range(3):
        subject.step()
    subject.expect_equal("weights and buffers", findings)
    layer, reference = subject.model.layers[2], subject.reference.layers[2]
    findings.equal("count of passes", layer.passes, reference.passes)


def training_channels_last(system: str, folder: str, findings: Findings) -> None:
    subject = Trained(system, channels_last_model)
    for _ in range(3):
        subject.step()
    subject.expect_equal("weights", findings)
    _expect_same_strides(findings)


def training_out_of_memory(system: str, folder: str, findings: Findings) -> None:
    subject = Trained(system, plain_model)
    subject.step()
    torch.cuda.synchronize()
    gc.collect()
    at_rest = torch.cuda.memory_allocated()
    GreedyLinear.armed = True
    try:
        subject.step()
        findings.faults.append("did not run out of memory")
    except torch.OutOfMemoryError:
        pass
    finally:
        GreedyLinear.armed = False
    torch.cuda.synchronize()
    gc.collect()
    if held := torch.cuda.memory_allocated() - at_rest:
        findings.notes.append(f"{held / MIB:.1f} MiB held until the next step")
    for _ in range(2):
        subject.step()
    subject.expect_equal("weights", findings)


def training_accumulated(system: str, folder: str, findings: Findings) -> None:
    """Two backward passes before a step of the optimizer."""
    if system.startswith("deepspeed"):
        raise NotOffered("by its configuration only")
    subject = Trained(system, plain_model)
    subject.step()
    subject.step(update=False)
    subject.step()
    subject.expect_equal("weights", findings)


def training_attached_twice(system: str, folder: str, findings: Findings) -> None:
    """A new optimizer for the same model."""
    subject = Trained(system, plain_model)
    for _ in range(2):
        subject.step()
    subject.attach()
    for _ in range(2):
        subject.step()
    subject.expect_equal("weights", findings)


def training_reloaded(system: str, folder: str, findings: Findings) -> None:
    subject = Trained(system, plain_model)
    subject.step()
    state = {name: 1.5 * value for name, value in subject.reference.state_dict().items()}
    subject.reference.load_state_dict(state)
    loaded = {name: value.clone() for name, value in state.items()}
    if system.startswith("fsdp"):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        set_model_state_dict(subject.model, loaded, options=options)
    else:
        subject.model.load_state_dict(loaded)
    subject.step()
    subject.expect_equal("weights", findings)


# ---- The table

INFERENCE_EDGES = {
    "tied_weights": tied_weights,
    "changed_buffers": changed_buffers,
    "channels_last": channels_last,
    "strided_weights": strided_weights,
    "backward": backward,
    "out_of_memory": out_of_memory,
    "full_card": full_card,
    "attached_twice": attached_twice,
    "two_threads": two_threads,
    "removed": removed,
    "reloaded": reloaded,
}
TRAINING_EDGES = {
    "tied_weights": training_tied_weights,
    "changed_buffers": training_changed_buffers,
    "channels_last": training_channels_last,
    "out_of_memory": training_out_of_memory,
    "accumulated": training_accumulated,
    "attached_twice": training_attached_twice,
    "reloaded": training_reloaded,
}

WORKLOADS = {
    "inference": (INFERENCE_SYSTEMS, INFERENCE_EDGES),
    "training": (TRAINING_SYSTEMS, TRAINING_EDGES),
}
CASES = [
    f"{workload}.{system}" for workload, (systems, _) in WORKLOADS.items() for system in systems
]


def observe_all(case: str, folder: str) -> dict[str, dict[str, str]]:
    """Runs every edge of a case, and returns a verdict and the reason for it by name of edge.

    Each runs in a process of its own, forked from this one, which has imported what takes long and
    has not used the card.
    """
    workload, _, system = case.partition(".")
    for module in _IMPORTED_BEFORE.get(system.partition("_")[0], ()):
        importlib.import_module(module)
    if torch.cuda.is_initialized():
        raise RuntimeError(f"importing what {system} needs has used the card: import it later")
    context = multiprocessing.get_context("fork")
    outcomes = {}
    for name, edge in WORKLOADS[workload][1].items():
        receiver, sender = context.Pipe(duplex=False)
        arguments = (edge, system, folder, sender)
        process = context.Process(target=_observe, args=arguments)
        process.start()
        sender.close()
        if not receiver.poll(EDGE_TIMEOUT_S):
            outcome = {"verdict": "no end", "reason": f"after {EDGE_TIMEOUT_S} s"}
        else:
            try:
                outcome = receiver.recv()
            except EOFError:
                process.join()
                outcome = {"verdict": "crash", "reason": f"exit status {process.exitcode}"}
        process.kill()
        process.join()
        outcomes[name] = outcome
    return outcomes


# Not diffusers, torchao and DeepSpeed, which use the card while they are imported.
_IMPORTED_BEFORE = {
    "accelerate": ("accelerate",),
    "flextensor": ("flextensor",),
    "fsdp": ("torch.distributed.fsdp",),
}


def _observe(edge: Callable, system: str, folder: str, sender: Connection) -> None:
    findings = Findings()
    torch.manual_seed(0)
    try:
        edge(system, folder, findings)
        torch.cuda.synchronize()
        verdict = "wrong" if findings.faults else "right"
    except Exception as error:
        verdict = "refused"
        message = str(error).strip().partition("\n")[0]
        findings.faults.append(f"{type(error).__name__}: {message[:160]}")
    sender.send({"verdict": verdict, "reason": "; ".join(findings.faults + findings.notes)})
