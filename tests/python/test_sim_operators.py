"""PyTorch's CUDA operators on the simulated card compute what the CPU computes, when a GPU would.

Results are compared bit by bit where the kernel is the same, and else to 1e-5.
"""

import math

import pytest

NUM_STEPS = 4


def same_bits(device, host):
    import torch

    assert device.dtype == host.dtype
    assert device.shape == host.shape
    assert torch.equal(device.cpu().nan_to_num(), host.nan_to_num())


def synchronisations(sim, function):
    before = sim.counters().host_syncs
    result = function()
    return sim.counters().host_syncs - before, result


# ---- Results

OPERATORS = {
    "add": lambda t, x, y: x + y,
    "add_number": lambda t, x, y: x + 2,
    "divide_integers": lambda t, x, y: x.long() / 3,
    "promote": lambda t, x, y: x.half() * y,
    "where": lambda t, x, y: t.where(x > 0, x, 0.0),
    "in_place": lambda t, x, y: x.clone().mul_(y).clamp_(min=0),
    "exp": lambda t, x, y: x.exp(),
    "sum": lambda t, x, y: x.sum(0),
    "mean": lambda t, x, y: x.mean(),
    "var": lambda t, x, y: x.var(1),
    "max": lambda t, x, y: x.max(1).indices,
    "sort": lambda t, x, y: x.sort(1).values,
    "topk": lambda t, x, y: x.topk(3).values,
    "cumsum": lambda t, x, y: x.cumsum(1),
    "cat": lambda t, x, y: t.cat([x, y.t().contiguous().t()], 1),
    "index": lambda t, x, y: x[t.tensor([2, 0], device=x.device)],
    "host_index": lambda t, x, y: x[t.tensor([2, 0])],
    "index_put": lambda t, x, y: x.clone().index_put_(
        (t.tensor([1, 1], device=x.device),), y[:2], True
    ),
    "gather": lambda t, x, y: x.gather(1, x.argsort(1)),
    "scatter_add": lambda t, x, y: x.scatter_add(1, y.argsort(1), y),
    "mm": lambda t, x, y: x @ y.t(),
    "addmm": lambda t, x, y: t.addmm(x[:, :6], x, y.t()),
    "bmm": lambda t, x, y: x[None].bmm(y.t()[None]),
    "softmax": lambda t, x, y: x.softmax(1),
    "gelu": lambda t, x, y: t.nn.functional.gelu(x),
    "layer_norm": lambda t, x, y: t.nn.functional.layer_norm(x, (8,), y[0], y[1]),
    "group_norm": lambda t, x, y: t.nn.functional.group_norm(x, 2),
    "embedding": lambda t, x, y: t.nn.functional.embedding(t.tensor([1, 3], device=x.device), x),
    "cross_entropy": lambda t, x, y: t.nn.functional.cross_entropy(x, y.argmax(1)),
    "mse_loss": lambda t, x, y: t.nn.functional.mse_loss(x, y, reduction="none"),
    "convolution": lambda t, x, y: t.nn.functional.conv2d(x[None, None], y[None, None, :3, :3]),
    "transposed": lambda t, x, y: t.nn.functional.conv_transpose1d(x[None], y[:, None, :3]),
    "pool": lambda t, x, y: t.nn.functional.max_pool1d(x[None], 2),
    "interpolate": lambda t, x, y: t.nn.functional.interpolate(x[None], scale_factor=2),
    "solve": lambda t, x, y: t.linalg.solve(x[:6, :6] + 9 * t.eye(6, device=x.device), y),
    "fft": lambda t, x, y: t.view_as_real(t.fft.fft(x)),
    "conjugate": lambda t, x, y: t.view_as_real((t.complex(x, y).conj() * 2).resolve_conj()),
    "one_hot": lambda t, x, y: t.nn.functional.one_hot(x.argmax(1), 9),
    "histc": lambda t, x, y: t.histc(x, 5, -2, 2),
    "arange": lambda t, x, y: t.arange(0, 3, 0.5, device=x.device),
    "linspace": lambda t, x, y: t.linspace(0, 1, 7, device=x.device),
    "strided_copy": lambda t, x, y: x.t().contiguous(),
    "overlapping_view": lambda t, x, y: x.as_strided((3, 4), (2, 1)).sum(1),
    "expand": lambda t, x, y: x[:, :1].expand(6, 5) + 1,
    "eye": lambda t, x, y: t.eye(3, 4, device=x.device),
    "abs": lambda t, x, y: t.complex(x, y).abs(),
    "safe_softmax": lambda t, x, y: t._safe_softmax(x, 1),
    "rms_norm": lambda t, x, y: t.nn.functional.rms_norm(x, (8,), y[0]),
    "std": lambda t, x, y: x.t().std(0, keepdim=True),
    "where_broadcast": lambda t, x, y: t.where(x.t() > 0, x[:, 0].double(), y[:1, :6].half()),
    "roll": lambda t, x, y: x.t().roll(2, 0),
    "tril": lambda t, x, y: x.tril(),
    "foreach": lambda t, x, y: t.stack(t._foreach_mul([x, y], 3.0)),
    # Their results are as many as the data say.
    "nonzero": lambda t, x, y: (x > 0).nonzero(),
    "mask": lambda t, x, y: x[x > 0],
    "assign_mask": lambda t, x, y: x.clone().masked_scatter_(x > 0, y),
    "unique": lambda t, x, y: (x > 0).long().unique(),
    "bincount": lambda t, x, y: x.argmax(1).bincount(),
    "repeat_interleave": lambda t, x, y: t.repeat_interleave(x.argmax(1)),
    "ctc_loss": lambda t, x, y: t.nn.functional.ctc_loss(
        x[:, None].log_softmax(2), t.tensor([[1, 2]], device=x.device), (6,), (2,)
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_results_are_those_of_the_cpu(torch, name):
    torch.manual_seed(0)
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    function = OPERATORS[name]
    expected = function(torch, x, y)
    for _ in range(2):  # with shape inference, and with what was kept of it
        same_bits(function(torch, x.cuda(), y.cuda()), expected)


def test_kept_shapes_are_not_mixed_up(torch):
    """One operator with other sizes, strides, dtypes, dimensions and flags, in turns."""
    # Integers, as a copy need not keep the order in which an expanded tensor is summed.
    x = torch.arange(24.0).view(4, 6)
    inputs = [x, x.t(), x[:, ::2], x[:1].expand(4, 6), x.double(), x.half(), x[0]]
    for _ in range(2):
        for source in inputs:
            for dim in range(source.dim()):
                for keepdim in (True, False):
                    result = source.cuda().sum(dim, keepdim)
                    same_bits(result, source.sum(dim, keepdim))


def test_ranges_count_integers_exactly(torch):
    assert torch.arange(2**53, 2**53 + 5, device="cuda").tolist() == [2**53 + i for i in range(5)]
    assert torch.arange(5, 0, -2, device="cuda").tolist() == [5, 3, 1]
    assert torch.arange(3, 3, device="cuda").tolist() == []


@pytest.mark.parametrize("end", [3, 5, 4.5])
def test_numbers_shape_ranges_and_only_those(torch, end):
    same_bits(torch.arange(0, end, device="cuda"), torch.arange(0, end))
    same_bits(torch.ones(2, device="cuda") * end, torch.ones(2) * end)


def test_out_arguments_take_their_size(torch):
    a = torch.ones(3, 4, device="cuda")
    out = torch.empty(0, device="cuda")
    torch.mm(a, a.t(), out=out)
    same_bits(out, torch.full((3, 3), 4.0))
    values, indices = torch.empty(0, device="cuda"), torch.empty(0, device="cuda").long()
    torch.max(a, 0, out=(values, indices))
    same_bits(values, torch.ones(4))
    with pytest.warns(UserWarning, match="output with one or more elements was resized") as warned:
        torch.add(a, a, out=out)
    assert len(warned) == 1
    same_bits(out, torch.full((3, 4), 2.0))
    found = torch.empty(0, device="cuda").long()
    torch.nonzero(a, out=found)
    assert found.shape == (12, 2)


def test_copies_convert_and_gather_on_either_side(torch):
    x = torch.randn(6, 4)
    same_bits(x.t().cuda(), x.t())
    same_bits(x.to("cuda", torch.float16), x.half())
    target = torch.empty(4, 6, device="cuda")
    target.t().copy_(x)
    same_bits(target, x.t())
    host = torch.empty(6, 4, dtype=torch.float64).copy_(x.cuda())
    assert torch.equal(host, x.double())
    same_bits(x.pin_memory().to("cuda", non_blocking=True), x)
    peer = torch.zeros(4, 6, device="cuda:1")
    peer.t().copy_(x.cuda().half())
    same_bits(peer, x.half().float().t())


# ---- Order and lifetime


def test_operators_wait_for_their_stream_and_the_host_does_not(torch, sim):
    stream = torch.cuda.Stream()
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    sim.hold(stream)
    with torch.cuda.stream(stream):
        y = x + 1
        x.add_(5)
    assert sim.pending(stream) >= 2
    assert torch.equal(x.cpu(), torch.zeros(4))  # on the default stream, before any of it has run
    sim.release(stream)
    stream.synchronize()
    assert torch.equal(y.cpu(), torch.ones(4))
    assert torch.equal(x.cpu(), torch.full((4,), 5.0))


def test_a_waiting_operator_keeps_no_memory(torch, sim):
    stream = torch.cuda.Stream()
    sim.hold(stream)
    with torch.cuda.stream(stream):
        x = torch.empty(2**20, device="cuda:0")
        y = x.neg()
        held = torch.cuda.memory_allocated()
        del x
        assert torch.cuda.memory_allocated() == held - 2**22
    sim.release(stream)
    stream.synchronize()
    del y


def test_host_scalars_are_taken_at_the_call(torch, sim):
    x, scale = torch.ones(2, device="cuda"), torch.tensor(2.0)
    torch.cuda.synchronize()
    sim.hold(torch.cuda.current_stream())
    y = x * scale
    scale.fill_(7)
    sim.release(torch.cuda.current_stream())
    assert y.tolist() == [2, 2]


@pytest.mark.parametrize("name", ["nonzero", "mask", "unique", "bincount"])
def test_results_of_unknown_size_make_the_host_wait(torch, sim, name):
    x = torch.randn(6, 8, device="cuda")
    y = torch.randn(6, 8, device="cuda")
    OPERATORS[name](torch, x, y)
    count, _ = synchronisations(sim, lambda: OPERATORS[name](torch, x, y))
    assert count >= 1


def test_results_of_known_size_do_not(torch, sim):
    x = torch.randn(6, 8, device="cuda")
    y = torch.randn(6, 8, device="cuda")
    torch.cuda.synchronize()
    for name in ("add", "mm", "sort", "layer_norm", "convolution", "foreach", "cross_entropy"):
        count, _ = synchronisations(sim, lambda name=name: OPERATORS[name](torch, x, y))
        assert count == 0, name


# ---- Device checks


def test_a_weight_left_on_the_host_is_refused(torch):
    x, weight = torch.ones(2, 3, device="cuda"), torch.ones(4, 3)
    functional = torch.nn.functional
    message = (
        r"Expected all tensors to be on the same device, but got mat2 is on cpu, different from "
        r"other tensors on cuda:0 \(when checking argument in method wrapper_CUDA_mm\)"
    )
    with pytest.raises(RuntimeError, match=message):
        functional.linear(x, weight)
    with pytest.raises(RuntimeError, match="wrapper_CUDA_addmm"):
        functional.linear(x, weight, torch.ones(4, device="cuda"))
    with pytest.raises(RuntimeError, match="got index is on cpu.*wrapper_CUDA__index_select"):
        functional.embedding(torch.tensor([0]), x)
    with pytest.raises(RuntimeError, match="same device|should be the same"):
        functional.conv1d(x[None], torch.ones(1, 2, 2))
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu!"):
        x + torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1!"):
        x + torch.ones(2, 3, device="cuda:1")
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([x, torch.ones(2, 3)])


def test_what_a_gpu_takes_from_the_host_is_taken(torch):
    x = torch.ones(2, 3, device="cuda")
    same_bits(x * torch.tensor(3.0), torch.full((2, 3), 3.0))
    same_bits(torch.where(x > 0, torch.tensor(1.0), torch.tensor(2.0)), torch.ones(2, 3))
    same_bits(x[torch.tensor([0])], torch.ones(1, 3))
    with pytest.raises(RuntimeError):
        torch.mm(x, torch.tensor(3.0))


def test_foreach_over_several_devices_goes_tensor_by_tensor(torch):
    results = torch._foreach_add([torch.ones(2, device=d) for d in ("cuda:0", "cuda:1", "cpu")], 1)
    assert [str(result.device) for result in results] == ["cuda:0", "cuda:1", "cpu"]
    for result in results:
        same_bits(result, torch.full((2,), 2.0))


# ---- Random numbers


def test_seeds_repeat_and_do_not_touch_the_cpu_generator(torch):
    functional = torch.nn.functional
    host_state = torch.get_rng_state()

    def draws():
        return [
            torch.randn(5, device="cuda"),
            functional.dropout(torch.ones(64, device="cuda")),
            torch.randperm(9, device="cuda"),
            torch.ones(4, device="cuda").bernoulli_(0.5),
            torch.multinomial(torch.ones(9, device="cuda"), 4),
        ]

    torch.cuda.manual_seed(3)
    first = draws()
    torch.randn(10)  # the CPU's generator has no say
    torch.cuda.manual_seed(3)
    for one, other in zip(first, draws(), strict=True):
        same_bits(one, other.cpu())
    assert not torch.equal(first[0], torch.randn(5, device="cuda"))
    torch.set_rng_state(host_state)
    draws()
    assert torch.equal(host_state, torch.get_rng_state())


def test_generator_states_are_kept_and_forked(torch):
    state = torch.cuda.get_rng_state()
    a = torch.rand(5, device="cuda")
    torch.cuda.set_rng_state(state)
    same_bits(torch.rand(5, device="cuda"), a.cpu())
    with torch.random.fork_rng():
        b = torch.rand(5, device="cuda")
    same_bits(torch.rand(5, device="cuda"), b.cpu())
    generator = torch.Generator("cuda").manual_seed(7)
    c = torch.rand(3, device="cuda", generator=generator)
    same_bits(torch.rand(3, device="cuda", generator=generator.manual_seed(7)), c.cpu())
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())


def test_numbers_are_drawn_when_enqueued(torch, sim):
    slow = torch.cuda.Stream()
    torch.cuda.manual_seed(1)
    sim.hold(slow)
    with torch.cuda.stream(slow):
        first = torch.rand(4, device="cuda")
    second = torch.rand(4, device="cuda").cpu()
    sim.release(slow)
    slow.synchronize()
    torch.cuda.manual_seed(1)
    same_bits(first, torch.rand(4, device="cuda").cpu())
    same_bits(second, torch.rand(4, device="cuda").cpu())


def test_dropout_scales_what_it_keeps(torch):
    x = torch.ones(10_000, device="cuda", requires_grad=True)
    y = torch.nn.functional.dropout(x, 0.25)
    y.sum().backward()
    assert set(y.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((y == 0).float().mean().item() - 0.25) < 0.03
    same_bits(x.grad, y.detach().cpu())


# ---- Training


def train(torch, device, model, inputs, labels, optimizer, autocast=None):
    torch.manual_seed(0)
    model = model().to(device)
    optimizer = optimizer(model.parameters())
    inputs, labels = inputs.to(device), labels.to(device)
    losses = []
    for _ in range(NUM_STEPS):
        with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(torch, **options):
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **options)


def digits_model(torch):
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, groups=2), nn.GroupNorm(4, 16), nn.SiLU(), nn.Flatten(),
        nn.Linear(64, 10),
    )  # fmt: skip


def digits(torch, count=64):
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    images = torch.tensor(images[:count], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return images, torch.tensor(labels[:count])


@pytest.mark.parametrize("cudnn", [False, True])
def test_a_cnn_learns_digits_as_on_the_cpu(torch, cudnn, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "enabled", cudnn)
    images, labels = digits(torch)
    losses = [
        train(torch, device, lambda: digits_model(torch), images, labels, adamw(torch))
        for device in ("cpu", "cuda")
    ]
    assert losses[0] == losses[1]
    assert losses[1][-1] < losses[1][0]


@pytest.mark.parametrize(
    "optimizer, kind",
    [
        (optimizer, kind)
        for optimizer in ("AdamW", "Adam", "SGD", "RMSprop")
        for kind in ("foreach", "fused", "neither")
        if (optimizer, kind) != ("RMSprop", "fused")  # PyTorch has none
    ],
)
def test_optimizers_step_as_on_the_cpu(torch, optimizer, kind):
    options = {"foreach": False} if kind == "neither" else {kind: True}
    make = lambda parameters: getattr(torch.optim, optimizer)(parameters, lr=1e-3, **options)  # noqa: E731
    images, labels = digits(torch, 16)
    host, device = (
        train(torch, device, lambda: digits_model(torch), images, labels, make)
        for device in ("cpu", "cuda")
    )
    assert device == pytest.approx(host, abs=1e-5)


def transformer(torch, dropout):
    nn = torch.nn

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)
            self.head = nn.Linear(16, 5)

        def forward(self, x):
            return self.head(self.encoder(x).mean(1))

    return Classifier()


def sequences(torch):
    torch.manual_seed(1)
    return torch.randn(6, 5, 16), torch.randint(0, 5, (6,))


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_a_transformer_trains_as_on_the_cpu(torch, dtype):
    autocast = dtype and getattr(torch, dtype)
    host, device = (
        train(
            torch,
            device,
            lambda: transformer(torch, 0.0),
            *sequences(torch),
            adamw(torch),
            autocast,
        )
        for device in ("cpu", "cuda")
    )
    assert device == pytest.approx(host, abs=1e-2 if dtype else 1e-5)


def test_a_transformer_with_dropout_and_autocast_repeats(torch):
    first, second = (
        train(
            torch, "cuda", lambda: transformer(torch, 0.2), *sequences(torch),
            adamw(torch, fused=True), torch.bfloat16,
        )
        for _ in range(2)
    )  # fmt: skip
    assert first == second
    assert all(map(math.isfinite, first))


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_train_as_on_the_cpu(torch, cell):
    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = getattr(torch.nn, cell)(16, 12, 2, batch_first=True, bidirectional=True)
            self.head = torch.nn.Linear(24, 5)

        def forward(self, x):
            return self.head(self.layer(x)[0][:, -1])

    host, device = (
        train(torch, device, Classifier, *sequences(torch), adamw(torch))
        for device in ("cpu", "cuda")
    )
    assert device == pytest.approx(host, abs=1e-5)


def test_a_gradient_scaler_skips_the_step_that_overflows(torch):
    parameter = torch.nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for factor, expected in ((math.inf, 1.0), (1.0, 0.5)):
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same_bits(parameter.detach(), torch.full((2,), expected))
    assert scaler.get_scale() == 2.0


def test_gradients_are_those_of_the_cpu(torch):
    functional = torch.nn.functional
    functions = (
        functional.logsigmoid,
        lambda x: functional.layer_norm(x, (8,), x[0], x[1]),
        lambda x: functional.group_norm(x, 2, x[0], x[1]),
        lambda x: functional.batch_norm(x, None, None, x[0], x[1], training=True),
        lambda x: functional.batch_norm(x, x[2].detach(), x[3].exp().detach(), x[0], x[1]),
        lambda x: functional.embedding_bag(torch.tensor([[1, 2]], device=x.device), x, mode="max"),
        lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    )
    torch.manual_seed(0)
    values = torch.randn(6, 8)
    for number, function in enumerate(functions):
        gradients = []
        for device in ("cpu", "cuda"):
            x = values.clone().to(device).requires_grad_()
            function(x).square().sum().backward()
            gradients.append(x.grad.cpu())
        assert torch.allclose(*gradients, atol=1e-5), number


def test_a_program_does_not_import_the_compiler(sim_process):
    """torch._dynamo takes seconds, and PyTorch imports it when a Python meta kernel first runs."""
    run = sim_process.run_code("""
        import sys, torch

        nn = torch.nn
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LayerNorm(144),
            nn.Dropout(0.5), nn.Linear(144, 10), nn.GELU(),
        ).cuda()
        loss = nn.functional.cross_entropy(
            model(torch.randn(2, 1, 8, 8, device="cuda")), torch.tensor([1, 2], device="cuda")
        )
        loss.backward()
        print(loss, "torch._dynamo" in sys.modules or "sympy" in sys.modules)
    """)
    assert run.output.rstrip().endswith("False"), run.output + run.errors


# ---- Graphs


def test_a_graph_computes_again_and_draws_anew(torch):
    functional = torch.nn.functional
    x, weight = torch.ones(8, 8, device="cuda"), torch.randn(8, 8, device="cuda")
    ones = torch.ones(64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        functional.dropout(functional.relu(x @ weight))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = functional.relu(x @ weight) + 1
        mask = functional.dropout(ones)
    torch.cuda.manual_seed(5)
    seen = []
    for value in (1, 2):
        x.fill_(value)
        graph.replay()
        same_bits(y, functional.relu(x.cpu() @ weight.cpu()) + 1)
        seen.append(mask.clone())
    assert not torch.equal(*seen)
    torch.cuda.manual_seed(5)
    graph.replay()
    same_bits(mask, seen[0].cpu())


# ---- Refusals


def test_what_has_no_cpu_kernel_is_refused_by_name(torch):
    with pytest.raises(
        NotImplementedError,
        match="aten::_cudnn_rnn_flatten_weight cannot run on the simulated device: it has no CPU "
        r"kernel; set torch.backends.cudnn.enabled = False",
    ):
        torch._cudnn_rnn_flatten_weight(
            [torch.ones(2, device="cuda")], 1, 1, 0, 1, 0, 1, False, False
        )


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_refused(torch):
    for make in (
        lambda: torch.eye(3, device="cuda").to_sparse(),
        lambda: torch.sparse_coo_tensor([[0]], [1.0], (2,), device="cuda"),
    ):
        with pytest.raises(NotImplementedError, match=r"aten::\w+ cannot run on the simulated dev"):
            make()


# Some are found by shape inference, some by the first run of the kernel.
WRONG = {
    "shapes": lambda t, f, h, i: f[:2] @ f[:2],
    "mm": lambda t, f, h, i: h @ f,
    "bmm": lambda t, f, h, i: h[None].bmm(f[None]),
    "linear": lambda t, f, h, i: t.nn.functional.linear(h, f),
    "softmax_of_integers": lambda t, f, h, i: i.softmax(1),
    "relu_of_bool": lambda t, f, h, i: t.relu(i.bool()),
    "add_in_fp8": lambda t, f, h, i: f.to(t.float8_e4m3fn) + f.to(t.float8_e4m3fn),
    "max_of_nothing": lambda t, f, h, i: f[:0].max(),
    "mode_of_nothing": lambda t, f, h, i: f[:0].mode(0),
    "inverse_in_half": lambda t, f, h, i: t.linalg.inv(h),
    "dimension": lambda t, f, h, i: f.sum(3),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_in_the_call_as_on_the_cpu(torch, name):
    host = torch.randn(4, 4)
    arguments = host, host.half(), host.long()
    with pytest.raises(Exception) as expected:
        WRONG[name](torch, *arguments)
    on_card = [each.cuda() for each in arguments]
    for _ in range(2):  # what was refused is not remembered as good
        with pytest.raises(type(expected.value)) as error:
            WRONG[name](torch, *on_card)
        assert str(error.value).splitlines()[0] == str(expected.value).splitlines()[0]
    torch.cuda.synchronize()  # the device works on


NOT_ON_CUDA = {
    "product_of_integers": lambda t, x: x.long() @ x.long(),
    "linear_of_integers": lambda t, x: t.nn.functional.linear(x.long(), x.long()),
    "layer_norm_of_two_types": lambda t, x: t.nn.functional.layer_norm(x.half(), (4,), x[0], x[0]),
}


@pytest.mark.parametrize("name", NOT_ON_CUDA)
def test_what_only_the_cpu_computes_is_refused(torch, name):
    NOT_ON_CUDA[name](torch, torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="not implemented for 'Long'|expected scalar type"):
        NOT_ON_CUDA[name](torch, torch.ones(4, 4, device="cuda"))
    torch.cuda.synchronize()


def test_a_new_kind_of_call_does_not_wait_for_a_stream_that_is_held(torch, sim):
    x = torch.ones(7, 11, device="cuda")
    sim.hold()
    try:
        y = x.atan2(x)
        assert sim.pending() > 0
    finally:
        sim.release()
    same_bits(y, torch.ones(7, 11).atan2(torch.ones(7, 11)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_widens_half_precision(torch, name, dtype):
    x = torch.randn(3, 5).to(getattr(torch, dtype))
    weights = torch.randn(3, 5)
    results = []
    for device in ("cuda", "cpu"):
        leaf = x.to(device).requires_grad_()
        y = getattr(torch.nn.functional, name)(leaf, 1, dtype=torch.float32)
        (y * weights.to(device)).sum().backward()
        results.append((y.detach(), leaf.grad))
    for on_card, on_host in zip(*results, strict=True):
        same_bits(on_card, on_host)


def test_attention_under_autocast(torch):
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).cuda()
    x = torch.randn(2, 3, 8)
    with torch.autocast("cuda"):
        y, weights = layer(*3 * [x.cuda()])
    assert (y.dtype, weights.dtype) == (torch.float16, torch.float32)
    expected = layer.cpu()(*3 * [x])
    assert torch.allclose(y.float().cpu(), expected[0], atol=1e-2)
    assert torch.allclose(weights.cpu(), expected[1], atol=1e-2)


def test_a_failing_kernel_breaks_the_device_and_is_named(sim_process):
    run = sim_process.run_code("""
        import torch

        x = torch.ones(3, device="cuda")
        try:
            x[torch.tensor([5], device="cuda")]
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(str(error).splitlines()[0])
        try:
            x + 1
        except RuntimeError as error:
            print(error)
    """)
    assert "device-side assert triggered" in run.output, run.errors
    assert (
        "aten::index.Tensor failed on the simulated device: index 5 is out of bounds" in run.output
    )


def test_dry_mode_computes_nothing_and_says_what_needs_values(sim_process):
    run = sim_process.run_code(
        """
        import torch

        x = torch.ones(40_000, 40_000, device="cuda")  # 6 GB that nothing here could hold twice
        print((x @ x).sum().item(), torch.cuda.max_memory_allocated() > 12e9)
        try:
            x.nonzero()
        except RuntimeError as error:
            print(error)
        """,
        "--dry",
        "--memory=80GiB",
    )
    assert run.status == 0, run.errors
    assert "0.0 True" in run.output
    assert "aten::nonzero cannot run in dry mode" in run.output


# ---- The clock


def modelled_ns(sim, function):
    import torch

    function()
    torch.cuda.synchronize()
    begin = sim.counters().kernel_time_ns
    function()
    torch.cuda.synchronize()
    return sim.counters().kernel_time_ns - begin


def test_kernels_cost_their_flops_and_bytes(torch, sim):
    small, large = (torch.ones(n, n, device="cuda") for n in (512, 2048))
    assert modelled_ns(sim, lambda: large + large) > 8 * modelled_ns(sim, lambda: small + small)
    product = modelled_ns(sim, lambda: large @ large)
    assert product > 3 * modelled_ns(sim, lambda: large + large)  # bound by its FLOPs
    assert product > 2 * modelled_ns(sim, lambda: large.bfloat16() @ large.bfloat16())
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert modelled_ns(sim, lambda: large @ large) < product / 2
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_operators_on_the_host_cost_host_time(torch, sim):
    def cost(function):
        begin = sim.now_ns()
        function()
        return sim.now_ns() - begin

    small, large = torch.ones(2**10), torch.ones(2**22)
    assert cost(lambda: large.add(1)) > 100 * cost(lambda: small.add(1)) > 0
    assert cost(lambda: large.view(2, -1)) == 0
    assert cost(lambda: torch.empty(2**22)) == 0
    parameter, gradient = torch.nn.Parameter(large.clone()), torch.ones(2**22)
    parameter.grad = gradient
    assert cost(torch.optim.SGD([parameter], foreach=True).step) >= cost(lambda: large.add_(1))
    # As often as called, not once more for what it calls itself.
    both = cost(lambda: torch.nn.functional.mse_loss(large, large))
    assert both < 1.5 * cost(lambda: large.add(1))


def test_copies_within_the_card_cost_the_host_no_computing(torch, sim):
    x = torch.ones(4096, 4096, device="cuda")
    x.t().contiguous()
    on_card = modelled_ns(sim, lambda: x.t().contiguous())
    before = sim.now_ns()
    for _ in range(20):
        x.t().contiguous()
    torch.cuda.synchronize()
    assert sim.now_ns() - before < 25 * on_card


def test_indexing_costs_the_rows_it_touches(torch, sim):
    table = torch.zeros(2**18, 64, device="cuda")
    rows = torch.arange(32, device="cuda")
    new = torch.ones(32, 64, device="cuda")
    whole = modelled_ns(sim, lambda: table + 1)
    for few in (
        lambda: torch.nn.functional.embedding(rows, table),
        lambda: table[rows],
        lambda: table.index_select(0, rows),
        lambda: table.index_put_((rows,), new),
        lambda: table.index_add_(0, rows, new),
        lambda: table.scatter_(0, rows[:, None].expand(32, 64), new),
    ):
        assert modelled_ns(sim, few) < whole / 5
    copied = modelled_ns(sim, lambda: table.index_add(0, rows, new))
    assert 0.8 * whole < copied < 1.5 * whole  # into a copy
    keys = torch.zeros(2**22, device="cuda")
    assert modelled_ns(sim, lambda: keys.sort()) > 5 * modelled_ns(sim, lambda: keys + 1)
