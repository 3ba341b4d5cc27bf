"""Models of the Hugging Face Hub against a local server: upload, download, revisions, offline, bad input."""

import json
import sys

import pytest
import torch
import yaml

import spherenet as sn
from export.hub_stub import HubStub
from spherenet.errors import MissingExtraError, ModelError
from spherenet.export import ModelCard, download_model, load_metadata, push_to_hub

huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return sn.create_model("cnn-3", 2, widths=(2, 2, 2), in_channels=1, input_size=8).eval()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server in place of the Hub, an empty cache and no token."""
    from huggingface_hub import constants

    with HubStub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
        yield server


def same(model, loaded):
    images = torch.randn(3, 1, 8, 8)
    return torch.equal(model(images), loaded(images))


def saved_files(model, folder):
    sn.save_model(model, folder, metadata={"classes": ["a", "b"]})
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_uploaded_model_is_loaded_bit_for_bit(hub, model):
    card = ModelCard("small", accuracy=0.75, accuracy_n=100, accuracy_on="the test images of x", license="MIT")
    address = model.push_to_hub("user/small", metadata={"classes": ["a", "b"]}, card=card, token="hf_test")
    (commit, files) = hub.repositories["user/small"][0]
    assert address == f"{hub.address}/user/small/commit/{commit}"
    assert set(files) == {"README.md", "config.json", "model.safetensors"}
    loaded = sn.from_pretrained("user/small")
    assert not loaded.training
    assert same(model, loaded)
    assert load_metadata(download_model("user/small")) == {"classes": ["a", "b"]}

    shown = huggingface_hub.ModelCard(files["README.md"].decode())
    assert (shown.data.library_name, shown.data.license) == ("spherenet", "mit")
    (result,) = shown.data.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.75)
    assert (result.dataset_name, result.task_type) == ("the test images of x", "image-classification")
    assert shown.text.strip().startswith("# small")


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body, self.classifier = torch.nn.Linear(64, width), torch.nn.Linear(width, 2)

    def forward(self, images):
        return self.classifier(self.body(images.flatten(1)).relu())


def test_converted_module_of_the_hub_needs_its_class(hub):
    converted = sn.to_sphere(Net(3), "sigmoid").eval()
    push_to_hub(converted, "user/net", arguments={"width": 3}, token="hf_test")
    assert same(converted, sn.from_pretrained("user/net", model=Net))
    with pytest.raises(ModelError, match=r"holds a module of the class .*Net': pass it as model"):
        sn.from_pretrained("user/net")


def test_revision_selects_a_commit(hub, model, tmp_path):
    other = sn.create_model("cnn-3", 2, widths=(2, 2, 2), in_channels=1, input_size=8).eval()
    first = hub.commit("user/two", saved_files(model, tmp_path / "a"))
    hub.commit("user/two", saved_files(other, tmp_path / "b"))
    assert same(other, sn.from_pretrained("user/two"))
    assert same(model, sn.from_pretrained("user/two", revision=first))
    with pytest.raises(ModelError, match="at revision 'v9' cannot be downloaded: RevisionNotFoundError"):
        sn.from_pretrained("user/two", revision="v9")


def test_cached_model_needs_no_network(hub, model, tmp_path):
    hub.commit("user/small", saved_files(model, tmp_path / "a"))
    with pytest.raises(ModelError, match=r"^config\.json of user/small cannot be downloaded: LocalEntryNotFoundError"):
        sn.from_pretrained("user/small", local_files_only=True)
    assert hub.log == []
    sn.from_pretrained("user/small")
    hub.log.clear()
    assert same(model, sn.from_pretrained("user/small", local_files_only=True))
    assert hub.log == []
    hub.repositories.clear()
    hub.shutdown()
    hub.server_close()
    assert same(model, sn.from_pretrained("user/small"))


def test_files_are_of_one_commit_if_the_branch_moves(hub, model, tmp_path, monkeypatch):
    files = saved_files(model, tmp_path / "a")
    first = hub.commit("user/moving", files)
    download = huggingface_hub.hf_hub_download

    def move_after(repository, file, **options):
        path = download(repository, file, **options)
        if file == "config.json":
            hub.commit("user/moving", {"model.safetensors": b"of another model"})
        return path

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", move_after)
    assert same(model, sn.from_pretrained("user/moving"))
    assert [path for _, path in hub.log if "safetensors" in path] == [
        f"user/moving/resolve/{first}/model.safetensors"
    ] * 2


def test_weights_of_another_library_are_not_downloaded(hub):
    hub.commit("user/bert", {"config.json": b'{"model_type": "bert"}', "model.safetensors": b"large"})
    with pytest.raises(ModelError, match="is not the config of a saved model"):
        sn.from_pretrained("user/bert")
    assert not any("safetensors" in path for _, path in hub.log)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config.json": b"["}, "not valid JSON"),
        ({"config.json": b"[" * 100_000}, "not valid JSON"),
        ({"model.safetensors": b"\x80\x04."}, r"model\.safetensors"),
        (
            {"model.safetensors": None},
            r"^model\.safetensors of user/wrong cannot be downloaded: RemoteEntryNotFoundError",
        ),
        ({"config.json": None}, r"^config\.json of user/wrong cannot be downloaded: RemoteEntryNotFoundError"),
    ],
)
def test_wrong_repository_is_one_sentence(hub, model, tmp_path, changed, message):
    files = {**saved_files(model, tmp_path / "a"), **changed}
    hub.commit("user/wrong", {name: content for name, content in files.items() if content is not None})
    with pytest.raises(ModelError, match=message) as raised:
        sn.from_pretrained("user/wrong")
    assert len(str(raised.value).splitlines()) == 1


def test_only_the_files_of_a_model_are_downloaded(hub, model, tmp_path):
    hub.commit("user/more", {**saved_files(model, tmp_path / "a"), "pytorch_model.bin": b"\x80\x04."})
    folder = download_model("user/more")
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_missing_repository(hub):
    with pytest.raises(ModelError, match=r"of user/missing cannot be downloaded: RepositoryNotFoundError"):
        sn.from_pretrained("user/missing")


@pytest.mark.parametrize("name", ["missing-folder", "a/b/c", "../x", "user/..", "user/na me", "", "user/x\n", "-a/b"])
def test_wrong_name_sends_no_request(hub, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match='must be an existing folder or the name of a repository such as "user/name"'):
        sn.from_pretrained(name)
    assert hub.log == []


def test_folder_needs_no_extra(model, tmp_path, monkeypatch):
    sn.save_model(model, tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert same(model, sn.from_pretrained(tmp_path / "saved"))
    with pytest.raises(ValueError, match="revision must be None for a folder, got 'main'"):
        sn.from_pretrained(tmp_path / "saved", revision="main")


def test_missing_extra_names_the_command(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = r"^huggingface_hub is not installed: pip install 'spherenet-torch\[hub\]'\.$"
    with pytest.raises(MissingExtraError, match=message):
        sn.from_pretrained("user/name")
    with pytest.raises(MissingExtraError, match=message):
        model.push_to_hub("user/name")


def test_failed_uploads(hub, model):
    with pytest.raises(ModelError, match=r"cannot be uploaded to user/forbidden: .*HTTP status 403"):
        model.push_to_hub("user/forbidden", token="hf_test")
    with pytest.raises(ModelError, match="repository must be a name such as"):
        push_to_hub(model, "no-user")
    changed = sn.create_model("cnn-3", 2, widths=(2, 2, 2), in_channels=1, input_size=8)
    changed.head = torch.nn.Identity()
    with pytest.raises(ModelError, match="as its config describes"):
        changed.push_to_hub("user/changed", token="hf_test")
    assert "user/changed" not in hub.repositories
    with pytest.raises(TypeError, match="privat"):
        model.push_to_hub("user/small", privat=True)


def test_header_of_a_card():
    card = ModelCard('a: "b"\n---', accuracy=1, accuracy_on="→: x", license="My own")
    _, header, text = card.to_hub_page().split("---\n", 2)
    data = yaml.safe_load(header)
    assert data["license"] == "other"
    assert data["model-index"][0]["name"] == 'a: "b" ---'
    assert data["model-index"][0]["results"][0]["dataset"] == {"name": "→: x", "type": "x"}
    assert text.strip() == card.to_markdown().strip()
    named = ModelCard("a", accuracy=1, accuracy_on="the test images of cifar10", dataset="cifar10").to_hub_page()
    assert "dataset:\n      name: cifar10\n      type: cifar10\n" in named
    assert "model-index" not in ModelCard("no accuracy").to_hub_page()
    assert json.loads(json.dumps(data)) == data
