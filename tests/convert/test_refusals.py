"""Models that cannot be converted are refused in one sentence, before anything is changed."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils import spectral_norm as old_spectral_norm

import spherenet as sn
from spherenet.convert import sphere_summary, to_plain, to_sphere
from spherenet.errors import ModelError


def with_layer(layer):
    """A layer in a model, between one that converts and the classifier."""
    return nn.ModuleDict({"first": nn.Linear(4, 4), "odd": layer, "fc": nn.Linear(4, 2)})


def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


def integers():
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    return layer


def quantised():
    from torch.ao.nn.quantized.dynamic import Linear

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Linear(4, 4)


def aware():
    from torch.ao.nn.qat import Conv2d
    from torch.ao.quantization import QConfig, default_fake_quant, default_weight_fake_quant

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Conv2d(4, 4, 3, qconfig=QConfig(activation=default_fake_quant, weight=default_weight_fake_quant))


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(4, 4))


def compiled_in_place():
    layer = nn.Linear(4, 4)
    layer.compile(backend="eager")
    return layer


class Packed(torch.Tensor):
    """A tensor subclass that computes for itself, as quantising and sharding libraries make them."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def packed():
    layer = nn.Linear(4, 4)
    layer._parameters["weight"] = torch.Tensor._make_subclass(Packed, torch.zeros(4, 4))
    return layer


REFUSED = {
    "parametrised": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "is parametrised.*remove_parametrizations"),
    "parametrised bias": (
        lambda: parametrizations.weight_norm(nn.Linear(4, 4), name="bias", dim=None), "is parametrised",
    ),
    "weight_norm": (lambda: old_weight_norm(nn.Linear(4, 4)), r"computes its weight in a hook.*remove the hook"),
    "spectral_norm": (lambda: old_spectral_norm(nn.Linear(4, 4)), "computes its weight in a hook"),
    "pruning": (lambda: prune.random_unstructured(nn.Conv2d(4, 4, 3), "weight", 0.5), "computes its weight in a hook"),
    "integers": (integers, "quantised or complex, its weight is torch.int8"),
    "complex": (lambda: nn.Linear(4, 4, dtype=torch.complex64), "its weight is torch.complex64"),
    "quantised": (quantised, "is quantised: convert the model before"),
    "quantisation aware": (aware, "is quantised"),
    "a tensor subclass": (packed, "weight of type Packed.*before quantising or sharding"),
    "scripted": (scripted, "scripted: convert it before torch.jit"),
    "compiled": (lambda: torch.compile(nn.Linear(4, 4), backend="eager"), "compiled: convert it before torch.compile"),
    "compiled in place": (compiled_in_place, "compiled: convert it before torch.compile"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence_with_the_model_as_it_was(case):
    make, message = REFUSED[case]
    model = with_layer(make())
    before = repr(model)
    with pytest.raises(ModelError, match=f"layer 'odd'.*{message}.*or skip it") as caught:
        to_sphere(model, inplace=True)
    assert "\n" not in str(caught.value)
    assert repr(model) == before
    assert type(model["first"]) is nn.Linear


@pytest.mark.parametrize("case", REFUSED)
def test_a_skipped_layer_is_no_error(case):
    model = with_layer(REFUSED[case][0]())
    sphere = to_sphere(model, skip="odd", inplace=True)
    assert isinstance(sphere["first"], sn.SphereLinear)
    assert type(sphere["odd"]) is type(model["odd"])
    reasons = {row.reason for row in sphere_summary(sphere) if row.name.startswith("odd")}
    assert reasons == {"skipped by rule 'odd'"}


def test_a_refused_layer_may_be_the_classifier():
    model = nn.Sequential(nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 2)))
    assert isinstance(to_sphere(model)[0], sn.SphereLinear)
    with pytest.raises(ModelError, match="'1'"):
        to_sphere(model, classifier=True)


WHOLE = {
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), backend="eager"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize("convert", [to_sphere, to_plain])
@pytest.mark.parametrize("case", WHOLE)
def test_whole_models(case, convert):
    with pytest.raises(ModelError, match=f"the model is {case}: convert it before"):
        convert(WHOLE[case]())


@pytest.fixture
def process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def distributed(model):
    return nn.parallel.DistributedDataParallel(model)


def sharded(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fully_sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")  # of one process
@pytest.mark.parametrize("convert", [to_sphere, to_plain])
@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (distributed, "wrapped by DistributedDataParallel: convert it before wrapping"),
        (sharded, "wrapped by FullyShardedDataParallel: convert it before wrapping"),
        (fully_sharded, "sharded by fully_shard: convert it before sharding"),
    ],
)
@pytest.mark.usefixtures("process_group")
def test_distributed_models(wrap, message, convert):
    with pytest.raises(ModelError, match=f"^the model is {message}.$"):
        convert(wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))


def test_scripted_parts_without_weights_are_no_obstacle():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.ReLU()), nn.Linear(4, 2))
    assert isinstance(to_sphere(model)[0], sn.SphereLinear)


NOTHING = {
    "no layers": (lambda: nn.Sequential(nn.ReLU(), nn.Embedding(3, 4)), {}, "it has no Conv1d, Conv2d, Conv3d, Linear"),
    "only a classifier": (lambda: nn.ModuleDict({"fc": nn.Linear(3, 4)}), {}, r"1 classifier \(named 'fc'\)"),
    "all skipped": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), {"skip": "*"}, "2 skipped by rule '\\*'"),
    "all spherical": (lambda: sn.SphereLinear(3, 4), {}, "1 already spherical"),
    "nothing asked for": (lambda: nn.Linear(3, 4), {"only": []}, "1 left out by only"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_to_convert(case):
    make, options, message = NOTHING[case]
    with pytest.raises(ModelError, match=f"no layer of the model was converted: {message}"):
        to_sphere(make(), **options)


WRONG = {
    "no module": (lambda: to_sphere(3), TypeError, "model must be a module, got 3"),
    "no module back": (lambda: to_plain("x"), TypeError, "model must be a module, got 'x'"),
    "operator": (lambda: to_sphere(nn.Linear(3, 4), "cos"), ValueError, "operator must be one of.*'cos'"),
    "operator None": (lambda: to_sphere(nn.Linear(3, 4), None), TypeError, "operator must be one of"),
    "k": (lambda: to_sphere(nn.Linear(3, 4), k=-1.0), ValueError, "k must be greater than 0"),
    "eps": (lambda: to_sphere(nn.Linear(3, 4), eps=0), ValueError, "eps must be greater than 0"),
    "rescale": (lambda: to_sphere(nn.Linear(3, 4), rescale="fixed"), ValueError, "rescale must be None"),
    "k_sharing": (lambda: to_sphere(nn.Linear(3, 4), k_sharing="net"), ValueError, "k_sharing must be one of"),
    "one k of no learned one": (
        lambda: to_sphere(nn.Linear(3, 4), k_sharing="network"), ValueError, "unless operator is .learnable",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call()


def test_one_k_cannot_live_on_two_devices():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4, device="meta"), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"several devices, got \['cpu', 'meta'\]"):
        to_sphere(model, "learnable", k_sharing="network")


def test_a_shared_angle_that_does_not_fit_changes_nothing():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))
    with pytest.raises(ValueError, match="operator must have 5 k"):
        to_sphere(model, sn.LearnableSigmoidAngle(4), inplace=True)
    assert [type(layer) for layer in model] == [nn.Linear] * 3
    assert [set(vars(layer)) for layer in model] == [set(vars(nn.Linear(3, 4)))] * 3


def test_a_model_that_cannot_be_copied_says_so():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model.cache = model(torch.randn(1, 3))  # a tensor with a history
    with pytest.raises(ModelError, match=r"cannot be copied.*pass inplace=True"):
        to_sphere(model)
    assert isinstance(to_sphere(model, inplace=True)[0], sn.SphereLinear)


def test_a_root_has_no_name():
    with pytest.raises(ModelError, match=r"^the model of type ParametrizedLinear is parametrised.*first\.$"):
        to_sphere(parametrizations.weight_norm(nn.Linear(4, 4)))


def test_back_from_what_is_not_the_librarys_own():
    class Mine(sn.SphereLinear):
        pass

    with pytest.raises(ModelError, match="'0' of type Mine has no plain counterpart"):
        to_plain(nn.Sequential(Mine(3, 4)))
    with pytest.raises(ModelError, match=r"'0'.*is parametrised"):
        to_plain(nn.Sequential(parametrizations.weight_norm(sn.SphereLinear(3, 4))))
