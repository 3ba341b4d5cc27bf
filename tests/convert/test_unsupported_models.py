"""Unsupported models and invalid arguments raise one-sentence errors and leave the model unchanged."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils import spectral_norm as old_spectral_norm

import spherenet as sn
from spherenet.convert import apply_conversion, conversion_record, sphere_summary, to_plain, to_sphere
from spherenet.errors import ModelError


def with_layer(layer):
    """Return a model with this layer between a convertible layer and the classifier."""
    return nn.ModuleDict({"first": nn.Linear(4, 4), "unsupported": layer, "fc": nn.Linear(4, 2)})


def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


def integer_weight():
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    return layer


def quantized():
    from torch.ao.nn.quantized.dynamic import Linear

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Linear(4, 4)


def quantization_aware():
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
    """Tensor subclass with its own dispatch, like those of quantization and sharding libraries."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def packed():
    layer = nn.Linear(4, 4)
    layer._parameters["weight"] = torch.Tensor._make_subclass(Packed, torch.zeros(4, 4))
    return layer


UNSUPPORTED = {
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "is parametrized.*remove_parametrizations"),
    "parametrized bias": (
        lambda: parametrizations.weight_norm(nn.Linear(4, 4), name="bias", dim=None), "is parametrized",
    ),
    "weight_norm": (lambda: old_weight_norm(nn.Linear(4, 4)), r"computes its weight in a hook.*remove the hook"),
    "spectral_norm": (lambda: old_spectral_norm(nn.Linear(4, 4)), "computes its weight in a hook"),
    "pruning": (lambda: prune.random_unstructured(nn.Conv2d(4, 4, 3), "weight", 0.5), "computes its weight in a hook"),
    "integer weight": (integer_weight, "quantized or complex, its weight is torch.int8"),
    "complex": (lambda: nn.Linear(4, 4, dtype=torch.complex64), "its weight is torch.complex64"),
    "quantized": (quantized, "is quantized: convert the model before"),
    "quantization aware": (quantization_aware, "is quantized"),
    "a tensor subclass": (packed, "weight of type Packed.*before quantizing or sharding"),
    "scripted": (scripted, "scripted: convert it before torch.jit"),
    "compiled": (lambda: torch.compile(nn.Linear(4, 4), backend="eager"), "compiled: convert it before torch.compile"),
    "compiled in place": (compiled_in_place, "compiled: convert it before torch.compile"),
}  # fmt: skip


COMPUTED = ("parametrized", "parametrized bias", "weight_norm", "spectral_norm", "pruning")
"""Layers that compute their weight from other tensors. They stay plain unless `only` selects them."""


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_layer_raises_and_leaves_the_model_unchanged(case):
    make, message = UNSUPPORTED[case]
    model = with_layer(make())
    before = repr(model)
    only = {"only": ["first", "unsupported"]} if case in COMPUTED else {}
    with pytest.raises(ModelError, match=f"layer 'unsupported'.*{message}.*or skip it") as caught:
        to_sphere(model, inplace=True, **only)
    assert "\n" not in str(caught.value)
    assert repr(model) == before
    assert type(model["first"]) is nn.Linear


@pytest.mark.parametrize("case", COMPUTED)
def test_layer_that_computes_its_weight_stays_plain(case):
    make, message = UNSUPPORTED[case]
    model = with_layer(make())
    before = type(model["unsupported"])
    sphere = to_sphere(model, inplace=True)  # torch cannot copy a layer with the old weight_norm
    assert isinstance(sphere["first"], sn.SphereLinear)
    assert type(sphere["unsupported"]) is before
    (row,) = [row for row in sphere_summary(sphere) if row.name == "unsupported"]
    assert re.match(f"not converted: {before.__name__} {message}", row.reason)


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_layer_may_be_skipped(case):
    model = with_layer(UNSUPPORTED[case][0]())
    sphere = to_sphere(model, skip="unsupported", inplace=True)
    assert isinstance(sphere["first"], sn.SphereLinear)
    assert type(sphere["unsupported"]) is type(model["unsupported"])
    reasons = {row.reason for row in sphere_summary(sphere) if row.name.startswith("unsupported")}
    assert reasons == {"skipped by rule 'unsupported'"}


def test_unsupported_layer_may_be_the_classifier():
    model = nn.Sequential(nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 2)))
    assert isinstance(to_sphere(model)[0], sn.SphereLinear)
    with pytest.raises(ModelError, match="'1'"):
        to_sphere(model, classifier=True, only=["0", "1"])


SEALED = {
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), backend="eager"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize("convert", [to_sphere, to_plain])
@pytest.mark.parametrize("case", SEALED)
def test_scripted_and_compiled_models_raise(case, convert):
    with pytest.raises(ModelError, match=f"the model is {case}: convert it before"):
        convert(SEALED[case]())


def with_ddp(model):
    return nn.parallel.DistributedDataParallel(model)


def with_fsdp(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def with_fully_shard(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")  # because of the single process
@pytest.mark.parametrize("convert", [to_sphere, to_plain])
@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (with_ddp, "wrapped by DistributedDataParallel: convert it before wrapping"),
        (with_fsdp, "wrapped by FullyShardedDataParallel: convert it before wrapping"),
        (with_fully_shard, "sharded by fully_shard: convert it before sharding"),
    ],
)
@pytest.mark.usefixtures("process_group")
def test_distributed_models_raise(wrap, message, convert):
    with pytest.raises(ModelError, match=f"^the model is {message}.$"):
        convert(wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))


def test_scripted_modules_without_weights_are_allowed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.ReLU()), nn.Linear(4, 2))
    assert isinstance(to_sphere(model)[0], sn.SphereLinear)


EMPTY = {
    "no layers": (lambda: nn.Sequential(nn.ReLU(), nn.Embedding(3, 4)), {}, "it has no Conv1d, Conv2d, Conv3d, Linear"),
    "only a classifier": (lambda: nn.ModuleDict({"fc": nn.Linear(3, 4)}), {}, r"1 classifier \(named 'fc'\)"),
    "all skipped": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), {"skip": "*"}, "2 skipped by rule '\\*'"),
    "all spherical": (lambda: sn.SphereLinear(3, 4), {}, "1 already spherical"),
    "empty only": (lambda: nn.Linear(3, 4), {"only": []}, "1 not selected by only"),
}


@pytest.mark.parametrize("case", EMPTY)
def test_model_without_selected_layers_raises(case):
    make, options, message = EMPTY[case]
    with pytest.raises(ModelError, match=f"no layer of the model was converted: {message}"):
        to_sphere(make(), **options)


INVALID = {
    "model": (lambda: to_sphere(3), TypeError, "model must be a module, got 3"),
    "model of to_plain": (lambda: to_plain("x"), TypeError, "model must be a module, got 'x'"),
    "operator": (lambda: to_sphere(nn.Linear(3, 4), "cos"), ValueError, "operator must be one of.*'cos'"),
    "operator None": (
        lambda: to_sphere(nn.Linear(3, 4), None), ValueError, "operator must be the name.*got None; use to_plain",
    ),
    "operator none": (
        lambda: to_sphere(nn.Linear(3, 4), "none"), ValueError, "operator must be the name.*got 'none'; use to_plain",
    ),
    "misspelled option": (
        lambda: to_sphere(nn.Linear(3, 4), shortcut=True), TypeError, "no option 'shortcut'; did you mean 'shortcuts'",
    ),
    "operator object": (lambda: to_sphere(nn.Linear(3, 4), 3), TypeError, "operator must be one of"),
    "k": (lambda: to_sphere(nn.Linear(3, 4), "sigmoid", k=-1.0), ValueError, "k must be greater than 0"),
    "eps": (lambda: to_sphere(nn.Linear(3, 4), eps=0), ValueError, "eps must be greater than 0"),
    "rescale": (lambda: to_sphere(nn.Linear(3, 4), rescale="fixed"), ValueError, "rescale must be None"),
    "k_sharing": (lambda: to_sphere(nn.Linear(3, 4), k_sharing="net"), ValueError, "k_sharing must be one of"),
    "k_sharing without learned k": (
        lambda: to_sphere(nn.Linear(3, 4), k_sharing="network"), ValueError, "unless operator is .learnable",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_invalid_arguments_raise(case):
    call, error, message = INVALID[case]
    with pytest.raises(error, match=message):
        call()


def test_k_sharing_network_needs_one_device():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4, device="meta"), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"several devices, got \['cpu', 'meta'\]"):
        to_sphere(model, "learnable", k_sharing="network")


def test_angle_function_of_wrong_size_leaves_the_model_unchanged():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))
    with pytest.raises(ValueError, match="operator must have 5 k"):
        to_sphere(model, sn.LearnableSigmoidAngle(4), inplace=True)
    assert [type(layer) for layer in model] == [nn.Linear] * 3
    assert [set(vars(layer)) for layer in model] == [set(vars(nn.Linear(3, 4)))] * 3


def test_model_that_cannot_be_copied_suggests_inplace():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model.cache = model(torch.randn(1, 3))  # a tensor that is not a leaf
    with pytest.raises(ModelError, match=r"cannot be copied.*pass inplace=True"):
        to_sphere(model)
    assert isinstance(to_sphere(model, inplace=True)[0], sn.SphereLinear)


def test_error_for_the_root_has_no_layer_name():
    with pytest.raises(ModelError, match=r"^the model of type Linear is quantized or complex.*floating point model\.$"):
        to_sphere(nn.Linear(4, 4, dtype=torch.complex64), classifier=True)
    with pytest.raises(ModelError, match=r"^no layer of the model was converted: 1 not converted: .* is parametrized"):
        to_sphere(parametrizations.weight_norm(nn.Linear(4, 4)), classifier=True)


@pytest.mark.parametrize("function", [to_sphere, to_plain, sphere_summary, conversion_record, sn.freeze,
                                      sn.param_groups, lambda model: apply_conversion(model, {})])  # fmt: skip
def test_a_tensor_in_place_of_a_model_is_not_printed(function):
    with pytest.raises(TypeError, match=r"^model must be a module, got a tensor of shape \[3, 5\] of type Tensor\.$"):
        function(torch.rand(3, 5))
    with pytest.raises(TypeError, match=r"^model must be a module, got 'resnet18' of type str\.$"):
        function("resnet18")
    with pytest.raises(TypeError) as caught:
        function([torch.rand(30, 50)])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_to_plain_of_subclasses_and_parametrized_layers_raises():
    class Subclass(sn.SphereLinear):
        pass

    with pytest.raises(ModelError, match="'0' of type Subclass is a subclass of a sphere layer"):
        to_plain(nn.Sequential(Subclass(3, 4)))
    with pytest.raises(ModelError, match=r"'0'.*is parametrized"):
        to_plain(nn.Sequential(parametrizations.weight_norm(sn.SphereLinear(3, 4))))
