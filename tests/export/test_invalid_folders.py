"""Corrupt and malicious folders: one-sentence errors, no code execution, no large allocations."""

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


def assert_rejected(folder, pattern):
    with pytest.raises(ModelError, match=pattern) as caught:
        load_model(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 1000
    return message


def edit_config(folder, change):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def test_missing_folder_or_file_raises(saved, tmp_path):
    assert_rejected(tmp_path / "nowhere", "the folder .*nowhere does not exist")
    assert_rejected(
        saved / "config.json", "config.json must be the folder of a saved model, got a file: sn.load_weights reads"
    )
    assert_rejected(tmp_path, "is not a saved model: it has no config.json")
    (saved / "model.safetensors").unlink()
    assert_rejected(saved, "the file .*model.safetensors does not exist")


TEXTS = {
    "empty": (b"", "is corrupt: it is not valid JSON"),
    "truncated": (b'{"format": "spherenet-model", "form', "is corrupt: it is not valid JSON"),
    "not UTF-8": (b"\xff\xfe\x00\x80", "is corrupt: it is not valid JSON"),
    "deeply nested": (b"[" * 100_000, "is corrupt: it is not valid JSON"),
    "NaN": (b'{"format": NaN}', "is corrupt: it is not valid JSON .NaN is not a finite number"),
    "long number": (b'{"format_version": ' + b"9" * 5000 + b"}", "is corrupt: it is not valid JSON"),
    "list": (b"[]", 'it has no "format"'),
    "other format": (b'{"format": "other"}', 'it has no "format"'),
    "no version": (b'{"format": "spherenet-model"}', "must have format_version 1, got 'None'"),
    "boolean version": (
        b'{"format": "spherenet-model", "format_version": true}',
        "must have format_version 1, got 'True'",
    ),
    "newer version": (
        b'{"format": "spherenet-model", "format_version": 2}',
        "must have format_version 1, got '2'",
    ),
    "module of a wrong type": (
        b'{"format": "spherenet-model", "format_version": 1, "module": [], "metadata": {}}',
        "'module' must be an object",
    ),
    "no model": (b'{"format": "spherenet-model", "format_version": 1}', "'model' must be an object"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_corrupt_config_raises(saved, case):
    text, reason = TEXTS[case]
    (saved / "config.json").write_bytes(text)
    assert_rejected(saved, reason)
    with pytest.raises(ModelError, match=reason):
        load_metadata(saved)


def test_oversized_config_is_not_read(saved):
    with (saved / "config.json").open("r+b") as file:
        file.truncate(2**31)
    assert_rejected(saved, "must have at most .* bytes")


def test_metadata_that_is_not_an_object_raises(saved):
    edit_config(saved, lambda config: config.update(metadata=[1]))
    assert_rejected(saved, "'metadata' must be an object")


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
def test_invalid_arguments_of_the_network_raise(saved, name):
    original = (saved / "config.json").read_text()
    for value in ARGUMENTS[name]:
        (saved / "config.json").write_text(original)
        edit_config(saved, lambda config, value=value: config["model"].update({name: value}))
        assert_rejected(
            saved, "config.json (must have|does not describe a model|has an invalid annealing|has the unknown argument)"
        )


def test_infinite_number_raises(saved):
    text = (saved / "config.json").read_text()
    (saved / "config.json").write_text(text.replace('"eps": 0.0001', '"eps": 1e999'))
    assert_rejected(saved, "it is not valid JSON .1e999 is not a finite number.")


def test_missing_network_name_raises(saved):
    edit_config(saved, lambda config: config["model"].pop("name"))
    assert_rejected(saved, "does not name a network")


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
def test_huge_networks_allocate_no_memory(saved, claim):
    """They are compared with the header of the safetensors file before any tensor is allocated."""
    edit_config(saved, lambda config: config["model"].update(claim))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        assert_rejected(saved, "does not describe a model|does not fit the model")
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


@pytest.mark.parametrize("size", [0, 4, 10, 0.5, -1])
def test_truncated_tensor_file_raises(saved, size):
    file = saved / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * size) if isinstance(size, float) else size])
    assert_rejected(saved, "is not a valid safetensors file")


def _header(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


_ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
FILES = {
    "pickle": pickle.dumps({"weight": [1.0]}),
    "zip of torch.save": b"PK\x03\x04" + b"\x00" * 100,
    "endless header": struct.pack("<Q", 2**63) + b"{}",
    "header longer than the file": struct.pack("<Q", 10**6) + b"{}",
    "header that is not JSON": _header(b"not json"),
    "header that is a list": _header([]),
    "deeply nested header": _header(b'{"a":' * 50_000),
    "offsets beyond the end": _header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\x00" * 4),
    "shape without data": _header({"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4]}}, b"\x00" * 4),
    "overlapping tensors": _header({"a": _ONE, "b": _ONE}, b"\x00" * 4),
    "negative shape": _header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"\x00" * 4),
    "unknown type": _header({"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, b"\x00" * 4),
    "type that is not supported": _header({"a": {"dtype": "U64", "shape": [1], "data_offsets": [0, 8]}}, b"\x00" * 8),
    "tie to a missing name": _header({"__metadata__": {"tied_tensors": '{"x": "y"}'}, "a": _ONE}, b"\x00" * 4),
    "ties as a list": _header({"__metadata__": {"tied_tensors": '["a"]'}, "a": _ONE}, b"\x00" * 4),
    "tie to a list": _header({"__metadata__": {"tied_tensors": '{"x": ["a"]}'}, "a": _ONE}, b"\x00" * 4),
    "tie of a stored name": _header({"__metadata__": {"tied_tensors": '{"a": "a"}'}, "a": _ONE}, b"\x00" * 4),
    "ties that are not JSON": _header({"__metadata__": {"tied_tensors": "{"}, "a": _ONE}, b"\x00" * 4),
    "deeply nested ties": _header({"__metadata__": {"tied_tensors": "[" * 100_000}, "a": _ONE}, b"\x00" * 4),
}


PICKLES = ("pickle", "zip of torch.save")


@pytest.mark.parametrize("case", FILES)
def test_invalid_tensor_file_raises(saved, case):
    (saved / "model.safetensors").write_bytes(FILES[case])
    pattern = "is not a valid safetensors file|must contain tensors of type"
    assert_rejected(saved, "must be a safetensors file, got a pickle" if case in PICKLES else pattern)


class _FailsIfUnpickled:
    def __reduce__(self):
        return (pytest.fail, ("the pickle was executed",))


def test_pickle_is_not_executed(saved):
    (saved / "model.safetensors").write_bytes(pickle.dumps(_FailsIfUnpickled()))
    assert_rejected(saved, "must be a safetensors file, got a pickle")
    torch.save({"weight": torch.ones(2)}, saved / "model.safetensors")
    assert_rejected(saved, "must be a safetensors file, got a pickle")


def test_missing_unexpected_and_different_tensors_are_named(saved):
    file = saved / "model.safetensors"
    tensors = load_file(file)
    names = list(tensors)

    def store(change):
        changed = dict(tensors)
        change(changed)
        save_file(changed, file)

    store(lambda t: t.pop("head.weight"))
    assert_rejected(saved, r"does not fit the model: 1 missing: head\.weight\.$")
    store(lambda t: [t.pop(name) for name in names[:5]])
    assert_rejected(saved, r"5 missing: \S+, \S+, \S+, …\.$")
    store(lambda t: t.update({"spare": torch.ones(1), "x" * 5000: torch.ones(1)}))
    assert_rejected(saved, "2 unexpected: spare, x{159}…")
    store(lambda t: t.update({"head.weight": torch.ones(3, 2)}))
    assert_rejected(
        saved, r"1 of another shape or type: head\.weight \(file \[3, 2\] float32, model \[10, 256\] float32\)"
    )
    store(lambda t: t.update({"head.weight": torch.ones(10, 256, dtype=torch.int64)}))
    assert_rejected(saved, r"head\.weight \(file \[10, 256\] int64")
    counter = next(name for name in names if name.endswith("num_batches_tracked"))
    store(lambda t: t.update({counter: torch.ones(())}))
    assert_rejected(saved, r"num_batches_tracked \(file \[\] float32, model \[\] int64\)")
    store(lambda t: (t.pop("head.weight"), t.update({"head.wieght": torch.ones(1)})))
    assert_rejected(saved, r"1 missing: head\.weight; 1 unexpected: head\.wieght\.$")
    store(lambda t: None)
    load_model(saved)
