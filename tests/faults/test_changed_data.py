"""Data that changed since a run was started are rejected, and another implementation is reported."""

import shutil

import pytest
import torch

from faults.children import OPTIONS
from faults.folders import sign, tensors_of
from faults.small_sets import write_images
from spherenet.runs import RunDirectory
from spherenet.runs.checkpoints import load_checkpoint

POINT = 14
IMAGES = ["--data", "folder", "--image-size", "12", "--batch-size", "4", "--workers", "0"]


@pytest.fixture
def run(children, folder):
    """Return an interrupted run on a folder of images."""
    write_images(folder / "images", per_class=12)
    path = folder / "run"
    options = [*OPTIONS, *IMAGES, "--data-dir", folder / "images", "--output", path]
    assert children.run("train", *options, die_at_step={"step": 10}).code == -9
    return path


def rename_a_class(images):
    (images / "cat").rename(images / "bear")


def add_images(images):
    shutil.copy(images / "cat" / "0.png", images / "cat" / "new.png")


def rename_an_image(images):
    (images / "dog" / "0.png").rename(images / "dog" / "zero.png")


def remove_an_image(images):
    (images / "dog" / "1.jpg").unlink()


CHANGES = {
    "a renamed class": (rename_a_class, "the classes must be those of the run (cat, dog), got bear, dog"),
    "an added image": (add_images, "of class 'cat' instead of"),
    "a removed image": (remove_an_image, "of class 'dog' instead of"),
    "a renamed image": (rename_an_image, "must be those that the run was started with"),
}


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("verb", ["resume", "evaluate"])
def test_changed_data_are_rejected(children, run, tried, case, verb):
    change, message = CHANGES[case]
    change(run.parent / "images")
    arguments = ["train", "--resume", run] if verb == "resume" else ["evaluate", run]
    done = children.run(*arguments)
    assert done.code == 2, done.output
    assert message in done.output
    assert ("--allow-changes" in done.output) == (verb == "resume" or case != "a renamed class")
    assert "Traceback" not in done.output
    if case != "a renamed class":
        assert children.run(*arguments, "--allow-changes").code == 0
    tried(f"{case}, then {verb}")


def test_same_images_in_another_directory_are_accepted(children, run, tried):
    (run.parent / "images").rename(run.parent / "moved")
    assert children.run("evaluate", run, "--data-dir", run.parent / "moved").code == 0
    assert children.run("train", "--resume", run, "--data-dir", run.parent / "moved").code == 0
    tried("the same images in another place")


def test_another_implementation_is_reported(children, interrupted, folder, tried):
    run = interrupted(10, folder / "run")
    for checkpoint in RunDirectory(run).checkpoints.paths():
        state = load_checkpoint(checkpoint).state
        assert state["implementation"]
        text = (checkpoint / "state.json").read_text()
        (checkpoint / "state.json").write_text(text.replace(state["implementation"], "abacus"))
        sign(checkpoint)
    done = children.run("train", "--resume", run)
    assert done.code == 0, done.output
    assert "computed by the implementation 'abacus'" in done.output
    tried("another implementation on --resume")


def test_best_checkpoint_of_an_abandoned_branch_is_removed(children, interrupted, folder, tried):
    """A best checkpoint after the step from which a run is resumed with other options does not belong to the run."""
    run = interrupted(10, folder / "run")
    directory = RunDirectory(run)
    (best,) = directory.checkpoints.paths("best")
    assert int(best.name.split("-")[1]) > 3
    for checkpoint in directory.checkpoints.paths()[-1:]:
        shutil.rmtree(checkpoint)  # the checkpoint of step 6 remains
    shutil.copytree(best, best.with_name("best-00000012"))
    shutil.rmtree(best)
    state = best.with_name("best-00000012") / "state.json"
    state.write_text(state.read_text().replace(f'"step": {int(best.name[5:])}', '"step": 12'))
    sign(state.parent)
    abandoned = {name: tensor for name, tensor in tensors_of(run).items() if name.startswith("best")}
    # A learning rate of 0 never improves the network, so no better checkpoint can replace the abandoned one by chance.
    options = ["--learning-rate", 0, "--milestones", 1000, "--allow-changes"]
    done = children.run("train", "--resume", run, *options)
    assert done.code == 0, done.output
    summary, (kept,) = directory.summary, directory.checkpoints.paths("best")
    assert int(kept.name.split("-")[1]) == summary["best_step"]
    assert load_checkpoint(kept).state["accuracy"] == summary["best_accuracy"]
    current = tensors_of(run)
    assert any(not torch.equal(current[name.replace("best-00000012", kept.name)], tensor)
               for name, tensor in abandoned.items())  # fmt: skip
    exported = folder / "exported"
    assert children.run("export", run, exported, "--checkpoint", "best").code == 0
    assert f"{summary['best_accuracy']:.2%}" in (exported / "README.md").read_text()
    tried("a best checkpoint after the step that a run was resumed from")
