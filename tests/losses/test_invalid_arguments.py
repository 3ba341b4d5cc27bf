"""Invalid arguments raise an error that names the argument, the value and what is allowed."""

import math

import pytest
import torch

from spherenet.angles import CustomAngle, LinearAngle
from spherenet.losses import (
    Annealing,
    ArcFaceLoss,
    ASoftmaxLoss,
    CosFaceLoss,
    GASoftmaxLoss,
    SoftmaxLoss,
    SSoftmaxLoss,
    WSoftmaxLoss,
)
from spherenet.ops.angular import AngularOutput

CONSTRUCTORS = {
    "m below 1": (lambda: GASoftmaxLoss(m=0.5), ValueError, "m must be at least 1, got 0.5"),
    "m of zero": (lambda: ASoftmaxLoss(0), ValueError, "m must be at least 1, got 0"),
    "NaN m": (lambda: ASoftmaxLoss(math.nan), ValueError, "m must be finite, got nan"),
    "m as text": (lambda: GASoftmaxLoss(m="4"), TypeError, "m must be a number, got '4'"),
    "negative cosine margin": (lambda: CosFaceLoss(-0.1), ValueError, "m must be at least 0.*got -0.1"),
    "cosine margin of 2": (lambda: CosFaceLoss(2), ValueError, "less than 2, got 2"),
    "negative angle margin": (lambda: ArcFaceLoss(-0.5), ValueError, "m must be at least 0.*got -0.5"),
    "angle margin beyond pi": (lambda: ArcFaceLoss(3.5), ValueError, "less than π, got 3.5"),
    "s of zero": (lambda: SSoftmaxLoss(s=0), ValueError, "s must be greater than 0, got 0"),
    "negative s": (lambda: CosFaceLoss(s=-30), ValueError, "s must be greater than 0, got -30"),
    "infinite s": (lambda: ArcFaceLoss(s=math.inf), ValueError, "s must be finite, got inf"),
    "no default s": (
        lambda: SSoftmaxLoss(CustomAngle(lambda theta: -theta)), ValueError, "s must be given.*got -0.785",
    ),
    "k of zero": (lambda: WSoftmaxLoss("sigmoid", 0), ValueError, "k must be greater than 0, got 0"),
    "negative k": (lambda: GASoftmaxLoss("sigmoid", k=-1), ValueError, "k must be greater than 0, got -1"),
    "NaN k": (lambda: SSoftmaxLoss("sigmoid", k=math.nan), ValueError, "k must be finite, got nan"),
    "k for the cosine": (lambda: WSoftmaxLoss("cosine", 0.5), ValueError, "k must be None for the cosine.*got 0.5"),
    "k beside an object": (lambda: WSoftmaxLoss(LinearAngle(), 0.5), ValueError, "k must be None.*object, got 0.5"),
    "default k of the sigmoid for the cosine": (
        lambda: WSoftmaxLoss("cosine", 0.3), ValueError, "k must be None for the cosine operator, got 0.3",
    ),
    "default k beside an object": (lambda: SSoftmaxLoss(LinearAngle(), k=0.3), ValueError, "k must be None.*got 0.3"),
    "operator and its other name": (
        lambda: WSoftmaxLoss(operator="cosine", angle="linear"), TypeError, "angle must be left out.*got 'linear'",
    ),
    "operator by position and its other name": (
        lambda: GASoftmaxLoss("cosine", angle="linear"), TypeError, "angle must be left out.*got 'linear'",
    ),
    "unknown angle": (lambda: WSoftmaxLoss("cosin"), ValueError, "operator must.*'cosin'.*mean 'cosine'"),
    "learnable by name": (lambda: WSoftmaxLoss("learnable"), ValueError, "got 'learnable': a loss owns no weights"),
    "angle of another type": (lambda: WSoftmaxLoss(3), TypeError, "operator must.*AngleFunction object, got 3"),
    "negative step": (lambda: GASoftmaxLoss.paper().set_step(-1), ValueError, "^step must be at least 0, got -1.$"),
    "step as text": (lambda: GASoftmaxLoss().set_step("1"), TypeError, "^step must be a number, got '1'"),
    "negative lambda": (
        lambda: setattr(GASoftmaxLoss(), "lambda_", -1.0), ValueError, "^lambda_ must be at least 0, got -1.0.$",
    ),
    "lambda as text": (lambda: setattr(GASoftmaxLoss(), "lambda_", "5"), TypeError, "^lambda_ must be a number"),
    "penalty form without penalty": (
        lambda: GASoftmaxLoss(scale="norm", penalty_form="absolute"), ValueError,
        "^penalty_form must be left out unless feature_penalty is set, got 'absolute'.$",
    ),
    "annealing of another type": (lambda: GASoftmaxLoss(annealing=5), TypeError, "annealing must.*got 5"),
    "reduction": (lambda: SoftmaxLoss(reduction="avg"), ValueError, "reduction must.*got 'avg'"),
    "smoothing above 1": (lambda: SoftmaxLoss(label_smoothing=1.5), ValueError, "from 0 to 1, got 1.5"),
    "negative smoothing": (lambda: SoftmaxLoss(label_smoothing=-0.1), ValueError, "from 0 to 1, got -0.1"),
    "ignore_index": (lambda: SoftmaxLoss(ignore_index=1.5), TypeError, "ignore_index must be an integer, got 1.5"),
    "class weights as a list": (lambda: SoftmaxLoss(class_weight=[1.0]), TypeError, "class_weight must.*got list"),
    "integer class weights": (lambda: SoftmaxLoss(class_weight=torch.ones(3).int()), TypeError, "class_weight.*int32"),
    "class weights of rank 2": (lambda: SoftmaxLoss(class_weight=torch.ones(2, 3)), ValueError, r"got \[2, 3\]"),
    "negative class weight": (
        lambda: SoftmaxLoss(class_weight=torch.tensor([1.0, -2.0])), ValueError, "at least 0, got -2.0",
    ),
    "NaN class weight": (
        lambda: SoftmaxLoss(class_weight=torch.tensor([1.0, math.nan])), ValueError, "finite.*got nan",
    ),
    "increasing schedule": (lambda: Annealing(1, 0.1, 5), ValueError, r"start must be at least floor \(5\), got 1"),
    "negative decay": (lambda: Annealing(decay=-0.1), ValueError, "decay must be at least 0, got -0.1"),
    "NaN floor": (lambda: Annealing(floor=math.nan), ValueError, "floor must be finite, got nan"),
    "run of 0 iterations": (lambda: Annealing.for_run(0), ValueError, "iterations must be greater than 0, got 0"),
    "floor after the run": (lambda: Annealing.for_run(100, floor_at=2), ValueError, "floor_at.*at most 1, got 2"),
}  # fmt: skip

OUTPUT = AngularOutput(torch.rand(2, 3), torch.ones(2), torch.ones(3), torch.zeros(3))
ONE_CLASS = AngularOutput(torch.rand(2, 1), torch.ones(2), torch.ones(1))
SOFT = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.2, 0.6]])
CALLS = {
    "label too large": (lambda loss: loss(OUTPUT, torch.tensor([0, 3])), ValueError, r"from 0 to 2 or.*-100.*got 3"),
    "negative label": (lambda loss: loss(OUTPUT, torch.tensor([-1, 0])), ValueError, "labels must.*got -1"),
    "boolean labels": (lambda loss: loss(OUTPUT, torch.tensor([True, False])), TypeError, "labels must.*torch.bool"),
    "complex labels": (lambda loss: loss(OUTPUT, torch.zeros(2, dtype=torch.cfloat)), TypeError, "labels.*complex64"),
    "floating class indices": (
        lambda loss: loss(OUTPUT, torch.tensor([0.0, 1.0])), ValueError, r"float32 of shape \[2\]",
    ),
    "labels of another batch": (
        lambda loss: loss(OUTPUT, torch.tensor([0, 1, 2])), ValueError, r"shape \[2\].*got shape \[3\]",
    ),
    "labels of rank 2": (lambda loss: loss(OUTPUT, torch.zeros(2, 3).long()), ValueError, r"got shape \[2, 3\]"),
    "labels as a list": (lambda loss: loss(OUTPUT, [0, 1]), TypeError, "labels must be a tensor, got list"),
    "labels on another device": (
        lambda loss: loss(OUTPUT, torch.zeros(2, dtype=torch.int64, device="meta")), ValueError, "cpu, got meta",
    ),
    "probability above 1": (lambda loss: loss(OUTPUT, SOFT * 2), ValueError, "probabilities from 0 to 1, got 1.2"),
    "negative probability": (lambda loss: loss(OUTPUT, -SOFT), ValueError, "from 0 to 1, got -0.5"),
    "NaN probability": (lambda loss: loss(OUTPUT, SOFT * math.nan), ValueError, "from 0 to 1, got nan"),
    "probabilities of sum 0.5": (lambda loss: loss(OUTPUT, SOFT / 2), ValueError, "sum to 1.*got a sum of 0.5"),
    "a single class": (lambda loss: loss(ONE_CLASS, torch.tensor([0, 0])), ValueError, r"at least 2.*got \[2, 1\]"),
    "scores of a single class": (lambda loss: loss.logits(ONE_CLASS), ValueError, r"at least 2.*got \[2, 1\]"),
    "cosines alone": (lambda loss: loss(OUTPUT.cosine, torch.tensor([0, 1])), TypeError, "AngularOutput.*got Tensor"),
    "integer cosines": (
        lambda loss: loss(OUTPUT._replace(cosine=torch.ones(2, 3).int()), torch.tensor([0, 1])), TypeError, "int32",
    ),
    "feature norms of another shape": (
        lambda loss: loss(OUTPUT._replace(feature_norm=torch.ones(2, 1)), torch.tensor([0, 1])),
        ValueError, r"feature_norm must have shape \[2\].*got \[2, 1\]",
    ),
    "weight norms of another shape": (
        lambda loss: loss(OUTPUT._replace(weight_norm=torch.ones(2)), torch.tensor([0, 1])),
        ValueError, r"weight_norm must have shape \[3\].*got \[2\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_invalid_constructor_argument(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(("call", "error", "message"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("loss", [SoftmaxLoss(), GASoftmaxLoss(), ArcFaceLoss()], ids=lambda loss: type(loss).__name__)
def test_invalid_call(loss, call, error, message, path):
    with pytest.raises(error, match=message):
        call(loss)


def test_class_weights_for_another_number_of_classes():
    with pytest.raises(ValueError, match="class_weight must have 3 entries, got 4"):
        SoftmaxLoss(class_weight=torch.ones(4))(OUTPUT, torch.tensor([0, 1]))


def test_ignore_index_with_probabilities():
    with pytest.raises(ValueError, match="ignore_index must be left out if labels are probabilities, got 2"):
        SoftmaxLoss(ignore_index=2)(OUTPUT, SOFT)


UNKNOWN_OPTIONS = {
    "weight": (lambda: SoftmaxLoss(weight=torch.ones(3)), "SoftmaxLoss has no option 'weight'; .* 'class_weight'"),
    "margin of ArcFace": (lambda: ArcFaceLoss(margin=0.5), r"ArcFaceLoss has no option 'margin'; did you mean 'm'\?"),
    "margin of CosFace": (lambda: CosFaceLoss(margin=0.5), r"CosFaceLoss has no option 'margin'; did you mean 'm'\?"),
    "margin of GA": (lambda: GASoftmaxLoss(margin=2), r"GASoftmaxLoss has no option 'margin'; did you mean 'm'\?"),
    "margin of A": (lambda: ASoftmaxLoss(margin=2), r"ASoftmaxLoss has no option 'margin'; did you mean 'm'\?"),
    "scale": (lambda: SSoftmaxLoss(scale=2), r"SSoftmaxLoss has no option 'scale'; did you mean 's'\?"),
    "scale of ArcFace": (lambda: ArcFaceLoss(scale=2), r"ArcFaceLoss has no option 'scale'; did you mean 's'\?"),
    "angle of softmax": (lambda: SoftmaxLoss(angle=LinearAngle()), "SoftmaxLoss has no option 'angle'"),
    "angle of A": (lambda: ASoftmaxLoss(angle="linear"), "ASoftmaxLoss has no option 'angle'"),
    "k of CosFace": (lambda: CosFaceLoss(k=0.3), "CosFaceLoss has no option 'k'"),
    "smoothing": (lambda: WSoftmaxLoss(smoothing=0.1), "WSoftmaxLoss has no option 'smoothing'; .* 'label_smoothing'"),
    "no similar option": (
        lambda: WSoftmaxLoss(zzz=1),
        r"WSoftmaxLoss has no option 'zzz'\. Allowed: operator, k, angle, class_w",
    ),
}


@pytest.mark.parametrize(("make", "message"), UNKNOWN_OPTIONS.values(), ids=UNKNOWN_OPTIONS)
def test_unknown_option_names_the_class_and_a_similar_option(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_subclass_can_pass_options_to_its_base():
    class Scaled(WSoftmaxLoss):
        def __init__(self, factor, **options):
            super().__init__(**options)
            self.factor = factor

    loss = Scaled(2, angle="linear", reduction="sum")
    assert (loss.factor, loss.angle.name, loss.reduction) == (2, "linear", "sum")
    with pytest.raises(TypeError, match=r"Scaled has no option 'factr'; did you mean 'factor'\?"):
        Scaled(factr=2)
