"""Folders from anywhere: whatever is in them, one sentence, no code run, no memory taken on a file's word."""

import json
import pickle
import resource
import struct
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file

from spherenet.errors import ModelError
from spherenet.export import load_metadata, load_model, save_model


@pytest.fixture
def saved(network, tmp_path):
    folder = tmp_path / "saved"
    save_model(network(operator="learnable", loss="ga-linear"), folder)
    return folder


def refused(folder, pattern):
    with pytest.raises(ModelError, match=pattern) as caught:
        load_model(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 1000
    return message


def edit(folder, change):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def test_what_is_no_folder(saved, tmp_path):
    refused(tmp_path / "nowhere", "there is no folder .*nowhere")
    refused(saved / "config.json", "there is no folder .*config.json")
    refused(tmp_path, "is not a saved model: it has no config.json")
    (saved / "model.safetensors").unlink()
    refused(saved, "there is no file .*model.safetensors")


TEXTS = {
    "empty": (b"", "is damaged: it is not JSON"),
    "cut": (b'{"format": "spherenet-model", "form', "is damaged: it is not JSON"),
    "no text": (b"\xff\xfe\x00\x80", "is damaged: it is not JSON"),
    "too deep": (b"[" * 100_000, "is damaged: it is not JSON"),
    "NaN": (b'{"format": NaN}', "is damaged: it is not JSON .NaN is no number"),
    "endless number": (b'{"format_version": ' + b"9" * 5000 + b"}", "is damaged: it is not JSON"),
    "a list": (b"[]", 'it has no "format"'),
    "another format": (b'{"format": "other"}', 'it has no "format"'),
    "no version": (b'{"format": "spherenet-model"}', "must have the format version 1, got 'None'"),
    "true": (b'{"format": "spherenet-model", "format_version": true}', "must have the format version 1, got 'True'"),
    "newer": (b'{"format": "spherenet-model", "format_version": 2}', "must have the format version 1, got '2'"),
    "no model": (b'{"format": "spherenet-model", "format_version": 1}', "'model' must be an object"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_damaged_json(saved, case):
    text, reason = TEXTS[case]
    (saved / "config.json").write_bytes(text)
    refused(saved, reason)
    with pytest.raises(ModelError, match=reason):
        load_metadata(saved)


def test_a_config_of_many_bytes_is_not_read(saved):
    with (saved / "config.json").open("r+b") as file:
        file.truncate(2**31)
    refused(saved, "must have at most .* bytes")


def test_metadata_must_be_an_object(saved):
    edit(saved, lambda config: config.update(metadata=[1]))
    refused(saved, "'metadata' must be an object")


ARGUMENTS = {
    "name": ["cnn-10", 7, None, ["cnn-3"], "__import__('os')", "x" * 10_000],
    "num_classes": [1, 0, -3, 2.5, "10", None, True, 2**31, 10**400],
    "operator": ["cos", 3, {"class": "os.system"}, ["cosine"]],
    "k": ["0.3", -1, 0, [0.3], True, 1e308],
    "loss": ["softmx", 3, None, {"loss": "softmax"}],
    "loss_options": [None, [], {"m": "4"}, {"angle": "linear"}, {"annealing": 3}, {"annealing": {"start": 1}},
                     {"annealing": {"start": 1, "decay": 1, "floor": 5}}, {"class_weight": ["a"]},
                     {"class_weight": [[1, 2]]}, {"class_weight": [-1.0] * 10}, {"reduction": "max"}, {"nested": {}}],
    "k_sharing": ["model", 1, None],
    "rescale": ["fixed", 1, [1], [1, 2, 3], ["a", "b"], [[1, 2], [3, 4]], True],
    "eps": [0, -1, "1e-4", None, [1e-4]],
    "batch_norm": [1, "true", None],
    "relu": [0, "yes"],
    "widths": [None, 3, [4, 6], [4, 6, 8, 10], [4, 6, 0], [4, 6, -8], [4, 6, "8"], [4, 6, 8.0], [4, 6, [8]],
               [4, 6, True], [4] * 200_000, {"0": 4}],
    "in_channels": [0, -1, 3.0, "3", None, 2**40],
    "input_size": [32, [32], [32, 32, 32], [4, 4], ["32", 32], None, [32, 0]],
    "shortcut": ["v1", None, 2],
    "head_bias": [1, None],
    "__class__": ["os"],
    "device": ["cuda"],
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_wrong_arguments_of_the_network(saved, name):
    original = (saved / "config.json").read_text()
    for value in ARGUMENTS[name]:
        (saved / "config.json").write_text(original)
        edit(saved, lambda config, value=value: config["model"].update({name: value}))
        refused(saved, "config.json (must have|describes no model|has a wrong annealing|has the unknown argument)")


def test_infinite_numbers_that_json_can_write(saved):
    text = (saved / "config.json").read_text()
    (saved / "config.json").write_text(text.replace('"eps": 0.0001', '"eps": 1e999'))
    refused(saved, "must have a number for eps, got inf")


def test_a_network_without_a_name(saved):
    edit(saved, lambda config: config["model"].pop("name"))
    refused(saved, "names no network")


@pytest.mark.parametrize(
    "claim",
    [
        {"widths": [10**9, 10**9, 10**9]},
        {"widths": [40_000, 40_000, 40_000]},
        {"num_classes": 2 * 10**9},
        {"input_size": [2**31 - 1, 2**31 - 1]},
        {"in_channels": 2**31 - 1, "name": "resnet-18", "widths": [2**31 - 1] * 4},
    ],
    ids=str,
)
def test_giants_take_no_memory(saved, claim):
    """They are compared with the file's header before any tensor is made."""
    edit(saved, lambda config: config["model"].update(claim))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        refused(saved, "describes no model|does not fit the model")
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


@pytest.mark.parametrize("part", [0, 4, 10, 0.5, -1])
def test_truncated_tensors(saved, part):
    file = saved / "model.safetensors"
    whole = file.read_bytes()
    size = int(len(whole) * part) if isinstance(part, float) else part
    file.write_bytes(whole[:size])
    refused(saved, "is not a whole safetensors file")


def _header(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


_ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
FILES = {
    "a pickle": pickle.dumps({"weight": [1.0]}),
    "a zip of torch.save": b"PK\x03\x04" + b"\x00" * 100,
    "a header without end": struct.pack("<Q", 2**63) + b"{}",
    "a header longer than the file": struct.pack("<Q", 10**6) + b"{}",
    "no JSON": _header(b"not json"),
    "a list": _header([]),
    "too deep": _header(b'{"a":' * 50_000),
    "offsets beyond the end": _header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\x00" * 4),
    "a shape without its data": _header(
        {"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4]}}, b"\x00" * 4
    ),
    "overlapping tensors": _header({"a": _ONE, "b": _ONE}, b"\x00" * 4),
    "negative": _header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"\x00" * 4),
    "a type nobody has": _header({"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, b"\x00" * 4),
    "a type torch has not": _header({"a": {"dtype": "U64", "shape": [1], "data_offsets": [0, 8]}}, b"\x00" * 8),
    "ties to nothing": _header({"__metadata__": {"tied_tensors": '{"x": "y"}'}, "a": _ONE}, b"\x00" * 4),
    "ties of a list": _header({"__metadata__": {"tied_tensors": '["a"]'}, "a": _ONE}, b"\x00" * 4),
    "ties to a list": _header({"__metadata__": {"tied_tensors": '{"x": ["a"]}'}, "a": _ONE}, b"\x00" * 4),
    "ties of a stored name": _header({"__metadata__": {"tied_tensors": '{"a": "a"}'}, "a": _ONE}, b"\x00" * 4),
    "ties that are no JSON": _header({"__metadata__": {"tied_tensors": "{"}, "a": _ONE}, b"\x00" * 4),
    "ties too deep": _header({"__metadata__": {"tied_tensors": "[" * 100_000}, "a": _ONE}, b"\x00" * 4),
}


@pytest.mark.parametrize("case", FILES)
def test_hostile_tensor_files(saved, case):
    (saved / "model.safetensors").write_bytes(FILES[case])
    refused(saved, "is not a whole safetensors file|holds tensors of the type")


class _Bomb:
    def __reduce__(self):
        return (pytest.fail, ("the pickle was run",))


def test_a_pickle_is_not_run(saved):
    (saved / "model.safetensors").write_bytes(pickle.dumps(_Bomb()))
    refused(saved, "is not a whole safetensors file")
    torch.save({"weight": torch.ones(2)}, saved / "model.safetensors")
    refused(saved, "is not a whole safetensors file")


def test_missing_extra_and_wrong_tensors_are_named(saved):
    file = saved / "model.safetensors"
    tensors = load_file(file)
    names = list(tensors)

    def stored(change):
        changed = dict(tensors)
        change(changed)
        save_file(changed, file)

    stored(lambda t: t.pop("head.weight"))
    refused(saved, r"does not fit the model: 1 missing: head\.weight\.$")
    stored(lambda t: [t.pop(name) for name in names[:5]])
    refused(saved, r"5 missing: \S+, \S+, \S+, …\.$")
    stored(lambda t: t.update({"spare": torch.ones(1), "x" * 5000: torch.ones(1)}))
    refused(saved, "2 too many: spare, x{159}…")
    stored(lambda t: t.update({"head.weight": torch.ones(3, 2)}))
    refused(saved, r"1 of another shape or type: head\.weight \(file \[3, 2\] float32, model \[10, 256\] float32\)")
    stored(lambda t: t.update({"head.weight": torch.ones(10, 256, dtype=torch.int64)}))
    refused(saved, r"head\.weight \(file \[10, 256\] int64")
    counter = next(name for name in names if name.endswith("num_batches_tracked"))
    stored(lambda t: t.update({counter: torch.ones(())}))
    refused(saved, r"num_batches_tracked \(file \[\] float32, model \[\] int64\)")
    stored(lambda t: (t.pop("head.weight"), t.update({"head.wieght": torch.ones(1)})))
    refused(saved, r"1 missing: head\.weight; 1 too many: head\.wieght\.$")
    stored(lambda t: None)
    load_model(saved)
