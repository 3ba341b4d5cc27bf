"""What stays plain unless asked: classifiers, attention projections, tied heads; and shortcuts by a flag."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.convert import sphere_summary, to_sphere
from spherenet.layers import SphereLayer


def module(**parts):
    """A module with these parts, whose class is called as `name` says."""
    cls = type(parts.pop("name", "Part"), (nn.Module,), {})
    made = cls()
    for name, part in parts.items():
        made.add_module(name, part)
    return made


def plain(model, **options):
    sphere = to_sphere(model, **options)
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return [n for n, m in sphere.named_modules() if isinstance(m, kinds) and not isinstance(m, SphereLayer)]


def linear(out=4):
    return nn.Linear(4, out)


def conv(kernel=3, out=4):
    return nn.Conv2d(4, out, kernel)


CLASSIFIERS = {
    "fc": (lambda: module(body=linear(), fc=linear()), ["fc"]),
    "defined first": (lambda: module(head=linear(2), body=conv(), norm=nn.BatchNorm2d(4)), ["head"]),
    "the last of three": (
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
    "a convolution by name": (lambda: module(body=conv(), classifier=conv(1)), ["classifier"]),
    "a convolution by position": (lambda: module(down=conv(), up=nn.ConvTranspose2d(4, 4, 2), out=conv(1)), ["out"]),
    "output activations": (lambda: nn.Sequential(linear(), linear(), nn.Softmax(-1)), ["1"]),
    "dropout behind": (lambda: nn.Sequential(linear(), nn.Sequential(linear(), nn.Dropout())), ["1.0"]),
    "features: rectified": (lambda: nn.Sequential(linear(), nn.Sequential(linear()), nn.ReLU()), []),
    "features: normalised": (lambda: module(body=linear(), last=linear(), norm=nn.LayerNorm(4)), []),
    "features: group norm": (lambda: module(body=conv(), last=conv(), norm=nn.GroupNorm(2, 4)), []),
    "a norm of another width": (lambda: module(body=linear(), last=linear(2), norm=nn.LayerNorm(4)), ["last"]),
    "a transposed convolution last": (lambda: nn.Sequential(conv(), conv(), nn.ConvTranspose2d(4, 2, 2)), []),
    "squeeze and excitation": (
        lambda: nn.Sequential(module(conv=conv(), fc=linear()), module(conv=conv(), fc=linear()), linear(2)),
        ["2"],
    ),
    "an angular head": (lambda: nn.Sequential(conv(), nn.Flatten(), linear(), sn.AngularHead(4, 3)), []),
    "a single layer": (lambda: nn.Sequential(linear()), []),
}  # fmt: skip


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_classifiers_stay_plain_unless_asked(case):
    make, expected = CLASSIFIERS[case]
    assert plain(make()) == expected
    assert plain(make(), classifier=True) == []


def attention(name="SelfAttention", **parts):
    return module(name=name, **parts)


def projections(*names):
    return {name: linear() for name in names}


ATTENTIONS = {
    "bert": attention(
        "BertAttention", self=module(**projections("query", "key", "value")), output=module(dense=linear())
    ),
    "llama": attention("LlamaAttention", **projections("q_proj", "k_proj", "v_proj", "o_proj")),
    "swin": attention("WindowAttention", **projections("qkv", "proj")),
    "diffusers": attention("Attention", **projections("to_q", "to_k", "to_v"), to_out=nn.ModuleList([linear()])),
    "by its parts alone": module(name="SABlock", **projections("qkv", "out_proj")),
    "convolutions": attention("AttnBlock", q=conv(1), k=conv(1), v=conv(1), proj_out=nn.Identity()),
}


@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_projections_stay_plain_unless_asked(case):
    model = module(blocks=nn.ModuleList([module(attn=ATTENTIONS[case], mlp=linear())]), norm=nn.LayerNorm(4))
    inside = [n for n, m in model.named_modules() if "attn" in n and isinstance(m, (nn.Linear, nn.Conv2d))]
    assert plain(model) == inside
    assert plain(model, attention=True) == []
    assert sphere_summary(to_sphere(model))[inside[0]].reason == "attention projection"


def test_a_network_that_is_called_after_its_attention_converts():
    gate = module(name="AttentionBlock", W_g=conv(1), W_x=conv(1), psi=conv(1))
    model = module(name="AttentionUnet", down=conv(), gate=gate, up=conv(), out=conv(1, out=2))
    assert plain(model) == ["out"]


def test_torchs_attention_is_never_converted():
    model = module(attn=nn.MultiheadAttention(4, 2), mlp=linear(), norm=nn.LayerNorm(4))
    sphere = to_sphere(model, attention=True)
    summary = sphere_summary(sphere)
    assert type(sphere.attn.out_proj) is type(model.attn.out_proj)
    assert summary["attn"].reason == "not converted: MultiheadAttention applies its weights itself"
    assert "applies its weight itself" in summary["attn.out_proj"].reason
    assert summary["mlp"].kind == "sphere"


def test_a_head_tied_to_an_embedding():
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
    everything = to_sphere(Language(), classifier=True)
    assert type(everything.decode) is sn.SphereLinear
    for model in (sphere, everything):
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
def test_shortcuts_by_a_flag(case):
    model = module(stem=conv(), residual_blocks=nn.ModuleList([SHORTCUTS[case]]), norm=nn.BatchNorm2d(4))
    assert plain(model) == []
    [name] = plain(model, shortcuts=False)
    assert case in name
    assert sphere_summary(to_sphere(model, shortcuts=False))[name].reason == "shortcut"


def test_wide_shortcuts_and_main_paths_are_no_shortcuts():
    blocks = nn.ModuleList([module(conv1=conv(1), residual=conv(3), project_conv=conv(1))])
    model = module(residual_blocks=blocks, patch_embed=module(proj=conv(2)), norm=nn.BatchNorm2d(4))
    assert plain(model, shortcuts=False) == []


def test_the_root_may_be_a_layer_or_a_head():
    assert isinstance(to_sphere(nn.Linear(3, 4)), sn.SphereLinear)
    root = nn.Sequential(OrderedDict(conv=conv(), fc=linear()))
    assert plain(root) == ["fc"]


@pytest.mark.parametrize("name", ["cnn-3", "resnet-32"])
def test_the_papers_networks_convert_to_their_twins(name):
    options = {"widths": (4, 6, 8)}
    cnn = sn.create_model(name, operator=None, **options)
    twin = sn.create_model(name, operator="sigmoid", **options)
    twin.load_state_dict(cnn.state_dict())
    sphere = to_sphere(cnn, shortcuts=False)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(sphere.eval()(x), twin.eval()(x), rtol=0, atol=0)
    assert list(sn.sphere_layers(sphere)) == list(sn.sphere_layers(twin))
