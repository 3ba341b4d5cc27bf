"""Training problem of a few seconds: noise, horizontal and vertical stripes, a network of three convolutions."""

import torch

import spherenet as sn
from spherenet.data import Augmentation, Dataset, Preprocessing
from spherenet.data.splits import TensorSplit
from spherenet.runs import RunDirectory
from spherenet.training import Processes, Reporter, StopSignals, TrainConfig, Trainer

CLASSES = 3
SINGLE = Processes(0, 1, torch.device("cpu"))
FLIP = Augmentation(horizontal_flip=True)
PREPROCESSING = Preprocessing((8, 8), 1, (127.5,), (128.0,), None)


def split(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    images = torch.randint(0, 120, (count, 8, 8, 1), generator=generator)
    for index, label in enumerate(labels.tolist()):
        if label == 1:
            images[index, ::2] += 130
        if label == 2:
            images[index, :, ::2] += 130
    return TensorSplit(images.to(torch.uint8), labels, PREPROCESSING)


def model(**options):
    torch.manual_seed(0)
    options = {"operator": "sigmoid", "batch_norm": True, "widths": (4, 6, 8), **options}
    return sn.create_model("cnn-3", CLASSES, in_channels=1, input_size=8, **options)


def config(**changes):
    small = {"iterations": 12, "batch_size": 16, "log_every": 2, "eval_every": 6, "checkpoint_every": 4,
             "eval_batch_size": 17, "seed": 3, "milestones": (8,), "augmentation": "flip", "probes": False}  # fmt: skip
    return TrainConfig(**{**small, **changes})


def trainer(path, network=None, *, processes=SINGLE, reporter=None, train=None, **changes):
    path.mkdir(exist_ok=True, parents=True)
    classes = tuple(map(str, range(CLASSES)))
    dataset = Dataset("stripes", classes, PREPROCESSING, split(70, 0) if train is None else train, split(40, 1))
    network = model() if network is None else network
    return Trainer(network, dataset, config(**changes), processes, RunDirectory(path), reporter=reporter)


def run(path, network=None, stop=None, **options):
    prepared = trainer(path, network, **options)
    return prepared, prepared.train(stop or StopSignals())


class StopAt(Reporter):
    """Request a stop during a step, as a signal does: the run saves a checkpoint after that step."""

    def __init__(self, step, stop):
        self.step, self.stop = step, stop

    def started(self, step, iterations):
        if self.step is not None and step == self.step - 1:
            self.stop.received = 15

    def stepped(self, step, loss, accuracy):
        self.started(step, 0)


def weights(prepared):
    return {name: tensor.clone() for name, tensor in prepared.model.state_dict().items()}


def assert_equal(first, second):
    assert set(first) == set(second)
    for name in first:
        assert torch.equal(first[name], second[name]), name


def rows(path):
    """Return the metrics of a run without its timings."""
    metrics = RunDirectory(path).metrics.read()
    return [{name: value for name, value in row.items() if name != "seconds"} for row in metrics]
