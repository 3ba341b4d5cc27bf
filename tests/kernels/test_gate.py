"""One gate decides whether kernels may read a tensor: every entry point with every kind of tensor."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

import spherenet as sn
from spherenet.kernels import dispatch
from spherenet.kernels.dispatch import readable


class Wrapped(torch.Tensor):
    """A tensor without memory that holds another one, as libraries for quantization define."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        args, kwargs = tree_map(
            lambda value: value.inner if isinstance(value, Wrapped) else value, (args, kwargs or {})
        )
        out = operation(*args, **kwargs)
        return Wrapped(out) if operation is torch.ops.aten.detach.default else out


class Mine(torch.Tensor):
    """A subclass with memory."""


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def truncated(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.nbytes - 4)
    return tensor


def in_inference(tensor):
    with torch.inference_mode():
        return tensor.clone()


def in_holes(tensor):
    holes = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2]
    return holes.copy_(tensor)


KINDS = {
    "wrapper": Wrapped,
    "subclass": lambda tensor: tensor.as_subclass(Mine),
    "negated": lambda tensor: torch._neg_view(-tensor),
    "imaginary": lambda tensor: torch.complex(tensor, -tensor).conj().imag,
    "functional": torch._to_functional_tensor,
    "zero": lambda tensor: torch._efficientzerotensor(tensor.shape),
    "freed": freed,
    "truncated": truncated,
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "inference": in_inference,
    "holes": in_holes,
    "shifted": lambda tensor: torch.cat([tensor.flatten()[:3], tensor.flatten()])[3:].view(tensor.shape),
}
PLAIN = ("inference", "holes", "shifted")
every_kind = pytest.mark.parametrize("kind", KINDS)


def of_layer(make, *shape):
    torch.manual_seed(0)
    layer, x = make(), torch.randn(*shape)

    def call(convert):
        values = {name: convert(value.detach()) for name, value in layer.named_parameters()}
        return [torch.func.functional_call(layer, {"weight": values["weight"]}, (x,)), layer(convert(x))]

    return call


def of_recurrence(name):
    torch.manual_seed(0)
    layer, x = getattr(sn, name)(3, 4), torch.randn(5, 2, 3)

    def call(convert):
        weights = {key: convert(value.detach()) for key, value in layer.named_parameters() if key.endswith("weight")}
        return [torch.func.functional_call(layer, weights, (x,))[0], layer(convert(x))[0]]

    return call


def of_head(loss):
    torch.manual_seed(0)
    loss, x, labels = sn.make_loss(loss).eval(), torch.randn(6, 4), torch.arange(6) % 5
    head = sn.AngularHead(4, 5, directions=loss.directions)

    def call(convert):
        weights = {"weight": convert(head.weight.detach())}
        return [loss(torch.func.functional_call(head, weights, (x,)), labels), loss(head(convert(x)), labels)]

    return call


def of_penalty(penalty):
    torch.manual_seed(0)
    layer = sn.SphereConv2d(3, 4, 3)

    def call(convert):
        other = sn.SphereConv2d(3, 4, 3)
        del other.weight
        other.weight = convert(layer.weight.detach())
        return [penalty(other)]

    return call


def of_module(make, *shapes):
    """A module whose parameters and buffers are converted, and its first input, one after the other."""
    torch.manual_seed(0)
    module, inputs = make(), [torch.randn(shape) for shape in shapes]

    def call(convert):
        values = {name: value.detach() for name, value in [*module.named_parameters(), *module.named_buffers()]}
        outputs = []
        for name, value in values.items():
            if value.dim() > 1:
                changed = {**values, name: convert(value)}
                outputs.append(torch.func.functional_call(module, changed, tuple(inputs)))
        outputs.append(module(convert(inputs[0]), *inputs[1:]))
        flat = [output if isinstance(output, tuple) else (output,) for output in outputs]
        return [value for output in flat for value in output if isinstance(value, torch.Tensor)]

    return call


def of_features(function, *rest):
    """A function of features [6, 4]."""
    torch.manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(6, 4))
    return lambda convert: [torch.as_tensor(function(convert(features), *rest))]


def of_fixed_head(loss):
    torch.manual_seed(0)
    head, loss, x, labels = sn.FixedHead.etf(5, 4), sn.make_loss(loss), torch.randn(6, 5), torch.arange(6) % 4

    def call(convert):
        weights = {"weight": convert(head.weight.detach())}
        return [loss(torch.func.functional_call(head, weights, (x,)), labels), loss(head(convert(x)), labels)]

    return call


def of_optimizer(make):
    """One step for a weight of another kind."""
    torch.manual_seed(0)
    start, gradient = torch.randn(3, 4), torch.randn(3, 4)

    def call(convert):
        weight = nn.Parameter(convert(start.clone()), requires_grad=True)
        weight.grad = convert(gradient.clone())
        make([weight]).step()
        return [weight.detach()]

    return call


LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
OTHER = torch.nn.functional.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))

ENTRY_POINTS = {
    "SphereConv2d": of_layer(lambda: sn.SphereConv2d(3, 4, 3), 2, 3, 6, 6),
    "centered SphereConv2d": of_layer(lambda: sn.SphereConv2d(3, 4, 3, center="patch", magnitude="tanh"), 2, 3, 6, 6),
    "SphereConv1d": of_layer(lambda: sn.SphereConv1d(3, 4, 3, operator="learnable"), 2, 3, 6),
    "SphereLinear": of_layer(lambda: sn.SphereLinear(3, 4, rescale="learned"), 2, 3),
    "SphereConvTranspose2d": of_layer(lambda: sn.SphereConvTranspose2d(3, 4, 3), 2, 3, 6, 6),
    "SphereLSTM": of_recurrence("SphereLSTM"),
    "SphereGRU": of_recurrence("SphereGRU"),
    "AngularHead": of_head("w-cosine"),
    "ArcFace": of_head("arcface"),
    "orthogonality": of_penalty(sn.orthogonality),
    "energy": of_penalty(sn.hyperspherical_energy),
    "SphereConv3d": of_layer(lambda: sn.SphereConv3d(2, 3, 3), 1, 2, 4, 4, 4),
    "FastConv2d": of_module(lambda: sn.FastConv2d(8, 8, 3, padding=1), (2, 8, 12, 12)),
    "FixedHead": of_fixed_head("arcface"),
    **{
        name: of_head(name)
        for name in ("adaface", "magface", "curricularface", "subcenter-arcface", "uniface", "sphereface2")
    },
}

OF_TORCH = {
    "MPConv2d": of_module(lambda: sn.MPConv2d(3, 4, 3), (2, 3, 6, 6)),
    "MPLinear": of_module(lambda: sn.MPLinear(3, 4), (2, 3)),
    "attention": of_module(lambda: sn.SphereMultiheadAttention(4, 2).eval(), (5, 2, 4), (6, 2, 4), (6, 2, 4)),
    "SphereViT": of_module(lambda: sn.SphereViT(3, 8, 4, 1, dim=8, depth=1, num_heads=2), (2, 1, 8, 8)),
    "SupCon": of_features(sn.SupConLoss(), LABELS),
    "InfoNCE": of_features(sn.InfoNCELoss(), OTHER),
    "SigLIP": of_features(sn.SigLIPLoss(), OTHER),
    "prototypical": of_features(sn.PrototypicalLoss(), LABELS),
    "alignment and uniformity": of_features(sn.AlignmentUniformityLoss(), OTHER),
    "neural_collapse": of_features(lambda x: sn.neural_collapse(x, LABELS).within_class_angle),
    "knn_cosine_score": of_features(lambda x: sn.knn_cosine_score(x, OTHER, 2)),
    "energy_score": of_features(sn.energy_score),
    "recall_at_k": of_features(lambda x: sn.recall_at_k(x, LABELS)),
    "VonMisesFisher": of_features(lambda x: sn.VonMisesFisher(x, 3.0).log_prob(OTHER)),
    "PowerSpherical": of_features(lambda x: sn.PowerSpherical(OTHER, 3.0).log_prob(x)),
    "Muon": of_optimizer(lambda weights: sn.optim.Muon(weights, norm="filter")),
    "Hyperball": of_optimizer(lambda weights: sn.optim.Hyperball(weights, "sgd")),
}


"""Entry points without kernels of this library: tensors with too little memory are read by torch's own operations."""


@pytest.fixture(autouse=True)
def always_in_blocks(monkeypatch):
    monkeypatch.setattr(dispatch, "LARGE_MAP", 0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in ENTRY_POINTS for kind in KINDS]
    + [(name, kind) for name in OF_TORCH for kind in KINDS if kind not in ("freed", "truncated")],
)
@pytest.mark.filterwarnings("ignore")
def test_every_entry_point_with_every_kind_of_tensor(name, kind):
    """The result is that of plain tensors, or torch raises an error. Kernels would end the process."""
    call = (ENTRY_POINTS | OF_TORCH)[name]
    expected = call(lambda tensor: tensor)
    with torch.no_grad():
        try:
            got = call(KINDS[kind])
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            is_inplace = name in ("Muon", "Hyperball") and kind == "inference"  # torch forbids it
            assert is_inplace or kind not in (*PLAIN, "subclass", "negated", "imaginary")
            return
    for value, wanted in zip(got, expected, strict=True):
        value = value.inner if isinstance(value, Wrapped) else value
        value = torch._from_functional_tensor(value) if torch._is_functional_tensor(value) else value
        if kind in ("wrapper", "subclass", "negated", "imaginary", "functional", *PLAIN):
            torch.testing.assert_close(value.as_subclass(torch.Tensor), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(ENTRY_POINTS | OF_TORCH))
@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.filterwarnings("ignore")
def test_freed_memory_is_an_error_of_the_plain_formula_too(name, implementation, monkeypatch):
    monkeypatch.setattr(dispatch, "LARGE_MAP", 1 << 19)
    call = (ENTRY_POINTS | OF_TORCH)[name]
    with sn.backend(implementation), pytest.raises(RuntimeError, match=r"allocated|out of bounds"):
        call(freed)


def _later(make, tensor, use):
    """Free the memory of a tensor after an object was created from it, and then use the object."""
    made = make(tensor)
    tensor.untyped_storage().resize_(0)
    use(made)


def _after_a_step(weight):
    optimizer = sn.optim.Muon([weight])
    weight.grad = torch.randn(3, 4)
    optimizer.step()
    freed_state = optimizer.state[weight]["momentum_buffer"]
    freed_state.untyped_storage().resize_(0)
    optimizer.step()


def _kappa(use):
    return lambda: _later(lambda kappa: sn.PowerSpherical(OTHER, kappa), torch.ones(6), use)


def _frozen(use):
    def call():
        layer = sn.SphereLinear(4, 3, operator="learnable")
        for tensor in layer.parameters():
            tensor.data.untyped_storage().resize_(0)
        use(layer)

    return call


FREED = {
    "samples": _kappa(lambda distribution: distribution.rsample()),
    "entropy": _kappa(lambda distribution: distribution.entropy()),
    "mean": _kappa(lambda distribution: distribution.mean),
    "variance": _kappa(lambda distribution: distribution.variance),
    "unchecked values": lambda: sn.VonMisesFisher(OTHER, 1.0, validate_args=False).log_prob(freed(OTHER)),
    "uniform": lambda: sn.HypersphericalUniform(4).log_prob(freed(OTHER)),
    "state of an optimizer": lambda: _after_a_step(nn.Parameter(torch.randn(3, 4))),
    "new optimizer": lambda: sn.optim.Hyperball([nn.Parameter(freed(OTHER))], "sgd"),
    "prototypes": lambda: sn.FixedHead(freed(OTHER)),
    "class weights": lambda: sn.SoftmaxLoss(class_weight=freed(torch.ones(3))),
    "magnitude-preserving sum": lambda: sn.mp_sum(freed(OTHER), OTHER),
    "magnitude-preserving activation": lambda: sn.mp_silu(freed(OTHER)),
    "learned k": _frozen(lambda layer: layer.k),
    "summary": _frozen(sn.sphere_summary),
    "diagnostics": _frozen(lambda layer: sn.regularizers.layer_diagnostics(layer)),
    "conversion": _frozen(lambda layer: sn.to_plain(layer)),
    "kept norms": _frozen(lambda layer: sn.keep_norms(torch.optim.SGD(layer.parameters(), 0.1), layer)),
}


@pytest.mark.parametrize("name", FREED)
def test_freed_memory_is_an_error_elsewhere(name):
    with pytest.raises(
        RuntimeError, match=r"tensor must have allocated memory, got shape \[.*\] in a storage of 0 bytes"
    ):
        FREED[name]()


@every_kind
def test_readable(kind):
    tensor = torch.randn(3, 4)
    assert readable(tensor, nn.Parameter(tensor), None, 0.3)
    if kind in ("freed", "truncated"):
        with pytest.raises(RuntimeError, match=r"tensor must have allocated memory, got shape \[3, 4\] in"):
            readable(KINDS[kind](tensor))
    else:
        assert readable(KINDS[kind](tensor)) == (kind in PLAIN)


def test_modes_and_transforms_close_the_gate():
    tensor = torch.randn(3, 4)
    seen = []
    with FlopCounterMode(display=False):
        seen.append(readable(tensor))
    with FakeTensorMode():
        seen.append(readable(tensor))
    torch.vmap(lambda row: seen.append(readable(row)) or row)(tensor)
    torch.func.grad(lambda row: seen.append(readable(tensor)) or row.sum())(tensor)
    torch.compile(lambda row: seen.append(readable(row)) or row, backend="eager")(tensor)
    with torch.autograd.forward_ad.dual_level():
        seen.append(readable(tensor))
    assert not any(seen)
    assert readable(tensor)


@pytest.mark.parametrize("no_grad", [True, False])
@pytest.mark.parametrize("operator", ["cosine", "learnable"])
def test_network_under_fake_tensor_mode(operator, no_grad):
    with FakeTensorMode(), torch.set_grad_enabled(not no_grad):
        model = sn.create_model("cnn-3", operator=operator, loss="arcface", widths=(4, 4, 4))
        images, labels = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
        loss, scores = model(images, labels)
        assert scores.shape == (2, 10)
        if not no_grad:
            loss.backward()
            assert all(parameter.grad is not None for parameter in model.parameters())


class Watching(TorchDispatchMode):
    """Record the operations that a tool sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def test_tools_see_operations_of_torch():
    layer, x = sn.SphereConv2d(3, 4, 3), torch.randn(1, 3, 5, 5, requires_grad=True)
    with Watching() as watching:
        layer(x).sum().backward()
    assert "convolution" in watching.names
    assert "convolution_backward" in watching.names
