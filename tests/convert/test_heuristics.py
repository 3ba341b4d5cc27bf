"""Layers that stay plain by default: classifiers, tied heads, attention projections and shortcuts."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.convert import sphere_summary, to_sphere
from spherenet.layers import SphereLayer


def module(class_name="Block", **children):
    """Return a module with these children, of a class with this name."""
    result = type(class_name, (nn.Module,), {})()
    for name, child in children.items():
        result.add_module(name, child)
    return result


def plain_layers(model, **options):
    """Return the names of the layers that a conversion leaves plain."""
    sphere = to_sphere(model, **options)
    types = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return [n for n, m in sphere.named_modules() if isinstance(m, types) and not isinstance(m, SphereLayer)]


def linear(out=4):
    return nn.Linear(4, out)


def conv(kernel=3, out=4):
    return nn.Conv2d(4, out, kernel)


CLASSIFIERS = {
    "fc": (lambda: module(body=linear(), fc=linear()), ["fc"]),
    "defined first": (lambda: module(head=linear(2), body=conv(), norm=nn.BatchNorm2d(4)), ["head"]),
    "last of three": (
        lambda: module(features=conv(), classifier=nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU(), linear())),
        ["classifier.4"],
    ),
    "numbered layers": (lambda: module(fc1=linear(), fc2=linear(), fc3=linear(2), relu=nn.ReLU()), ["fc3"]),
    "several heads": (lambda: module(body=linear(), heads=nn.ModuleList([linear(), linear()])), ["heads.0", "heads.1"]),
    "auxiliary": (
        lambda: module(a=conv(), aux1=module(conv=conv(), fc1=linear(), fc2=linear()), fc=linear()),
        ["aux1.fc2", "fc"],
    ),
    "suffixes": (lambda: module(body=linear(), cls_score=linear(), box_head=linear()), ["cls_score", "box_head"]),
    "convolution by name": (lambda: module(body=conv(), classifier=conv(1)), ["classifier"]),
    "convolution by position": (lambda: module(down=conv(), up=nn.ConvTranspose2d(4, 4, 2), out=conv(1)), ["out"]),
    "softmax after it": (lambda: nn.Sequential(linear(), linear(), nn.Softmax(-1)), ["1"]),
    "dropout after it": (lambda: nn.Sequential(linear(), nn.Sequential(linear(), nn.Dropout())), ["1.0"]),
    "features: rectified": (lambda: nn.Sequential(linear(), nn.Sequential(linear()), nn.ReLU()), []),
    "features: normalized": (lambda: module(body=linear(), last=linear(), norm=nn.LayerNorm(4)), []),
    "features: group norm": (lambda: module(body=conv(), last=conv(), norm=nn.GroupNorm(2, 4)), []),
    "norm of another width": (lambda: module(body=linear(), last=linear(2), norm=nn.LayerNorm(4)), ["last"]),
    "transposed convolution last": (lambda: nn.Sequential(conv(), conv(), nn.ConvTranspose2d(4, 2, 2)), []),
    "squeeze and excitation": (
        lambda: nn.Sequential(module(conv=conv(), fc=linear()), module(conv=conv(), fc=linear()), linear(2)),
        ["2"],
    ),
    "angular head": (lambda: nn.Sequential(conv(), nn.Flatten(), linear(), sn.AngularHead(4, 3)), []),
    "single layer": (lambda: nn.Sequential(linear()), []),
}  # fmt: skip


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_classifiers_stay_plain_by_default(case):
    make, expected = CLASSIFIERS[case]
    assert plain_layers(make()) == expected
    assert plain_layers(make(), classifier=True) == []


def projections(*names):
    return {name: linear() for name in names}


ATTENTIONS = {
    "bert": module("BertAttention", self=module(**projections("query", "key", "value")), output=module(dense=linear())),
    "llama": module("LlamaAttention", **projections("q_proj", "k_proj", "v_proj", "o_proj")),
    "swin": module("WindowAttention", **projections("qkv", "proj")),
    "diffusers": module("Attention", **projections("to_q", "to_k", "to_v"), to_out=nn.ModuleList([linear()])),
    "by its children alone": module("SABlock", **projections("qkv", "out_proj")),
    "convolutions": module("AttnBlock", q=conv(1), k=conv(1), v=conv(1), proj_out=nn.Identity()),
}


@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_projections_stay_plain_by_default(case):
    model = module(blocks=nn.ModuleList([module(attn=ATTENTIONS[case], mlp=linear())]), norm=nn.LayerNorm(4))
    inside = [n for n, m in model.named_modules() if "attn" in n and isinstance(m, (nn.Linear, nn.Conv2d))]
    assert plain_layers(model) == inside
    assert plain_layers(model, attention=True) == []
    assert sphere_summary(to_sphere(model))[inside[0]].reason == "attention projection"


def test_network_with_attention_in_its_class_name_converts():
    gate = module("AttentionBlock", W_g=conv(1), W_x=conv(1), psi=conv(1))
    model = module("AttentionUnet", down=conv(), gate=gate, up=conv(), out=conv(1, out=2))
    assert plain_layers(model) == ["out"]


def test_multihead_attention_is_not_converted_by_default():
    model = module(attn=nn.MultiheadAttention(4, 2), mlp=linear(), norm=nn.LayerNorm(4))
    sphere = to_sphere(model)
    summary = sphere_summary(sphere)
    assert type(sphere.attn) is nn.MultiheadAttention
    assert type(sphere.attn.out_proj) is type(model.attn.out_proj)
    assert summary["attn"].reason == "attention"
    assert "applies its weight itself" in summary["attn.out_proj"].reason
    assert summary["mlp"].kind == "sphere"


def test_head_tied_to_an_embedding_stays_plain_by_default():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.decode = nn.Linear(4, 9, bias=False)
            self.words = nn.Embedding(9, 4)
            self.decode.weight = self.words.weight
            self.body = nn.Linear(4, 4)
            self.norm = nn.LayerNorm(4)

        def forward(self, x):
            return self.decode(self.norm(self.body(self.words(x))))

    sphere = to_sphere(Language())
    assert sphere_summary(sphere)["decode"].reason == "classifier (weight tied to the embedding 'words')"
    assert type(sphere.decode) is nn.Linear
    with_classifier = to_sphere(Language(), classifier=True)
    assert type(with_classifier.decode) is sn.SphereLinear
    for model in (sphere, with_classifier):
        assert model.decode.weight is model.words.weight
        model(torch.tensor([[1, 2]])).square().sum().backward()
        assert model.words.weight.grad.isfinite().all()


SHORTCUTS = {
    "downsample": module(conv1=conv(), conv2=conv(1), downsample=nn.Sequential(conv(1), nn.BatchNorm2d(4))),
    "shortcut": module(layer=nn.Sequential(conv(1)), shortcut=module(convolution=conv(1))),
    "conv_shortcut": module(conv=conv(), conv_shortcut=conv(1)),
    "skip": module(conv=conv(), skip_conv=conv(1)),
    "residual": module(conv=conv(1), residual=conv(1)),
    "proj": module(conv=conv(1), proj=conv(1)),
}


@pytest.mark.parametrize("case", SHORTCUTS)
def test_shortcuts_stay_plain_by_default(case):
    model = module(stem=conv(), residual_blocks=nn.ModuleList([SHORTCUTS[case]]), norm=nn.BatchNorm2d(4))
    assert plain_layers(model, shortcuts=True) == []
    [name] = plain_layers(model)
    assert case in name
    assert plain_layers(model, shortcuts=False) == [name]
    assert sphere_summary(to_sphere(model))[name].reason == "shortcut"


def test_wide_shortcuts_and_main_paths_convert():
    blocks = nn.ModuleList([module(conv1=conv(1), residual=conv(3), project_conv=conv(1))])
    model = module(residual_blocks=blocks, patch_embed=module(proj=conv(2)), norm=nn.BatchNorm2d(4))
    assert plain_layers(model, shortcuts=False) == []


def test_root_may_be_a_layer():
    assert isinstance(to_sphere(nn.Linear(3, 4)), sn.SphereLinear)
    root = nn.Sequential(OrderedDict(conv=conv(), fc=linear()))
    assert plain_layers(root) == ["fc"]


@pytest.mark.parametrize("name", ["cnn-3", "resnet-32"])
def test_converted_cnn_equals_sphere_network_of_create_model(name):
    """The defaults agree: operator "cosine", plain shortcuts, plain head."""
    options = {"widths": (4, 6, 8)}
    cnn = sn.create_model(name, operator=None, **options)
    expected = sn.create_model(name, **options)
    expected.load_state_dict(cnn.state_dict())
    sphere = to_sphere(cnn)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(sphere.eval()(x), expected.eval()(x), rtol=0, atol=0)
    assert list(sn.regularizers.sphere_layers(sphere)) == list(sn.regularizers.sphere_layers(expected))


def test_adaptive_softmax_stays_plain():
    model = module(body=nn.Linear(16, 32), out=nn.AdaptiveLogSoftmaxWithLoss(32, 1000, [10, 100]))
    assert plain_layers(model) == [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)][1:]
    assert plain_layers(model, classifier=True) == []
