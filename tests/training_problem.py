"""A problem of seconds for the engine: stripes against noise, a three-layer network."""

import torch

import spherenet as sn
from spherenet.data import Augmentation, Preprocessing
from spherenet.data.tensor_split import TensorSplit
from spherenet.engine import Processes, Reporter, Settings, StopSignals, Trainer
from spherenet.runlog import RunDirectory

CLASSES = 3
ALONE = Processes(0, 1, torch.device("cpu"))
FLIP = Augmentation(horizontal_flip=True)


def split(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    pictures = torch.randint(0, 120, (count, 8, 8, 1), generator=generator)
    for index, label in enumerate(labels.tolist()):
        if label == 1:
            pictures[index, ::2] += 130
        if label == 2:
            pictures[index, :, ::2] += 130
    return TensorSplit(pictures.to(torch.uint8), labels, Preprocessing((8, 8), 1, (127.5,), (128.0,), None))


def model(**options):
    torch.manual_seed(0)
    options = {"operator": "sigmoid", "batch_norm": True, "widths": (4, 6, 8), **options}
    return sn.create_model("cnn-3", CLASSES, in_channels=1, input_size=8, **options)


def orthogonality(made):
    return 1e-4 * sn.orthogonality(made)


def settings(**changes):
    small = {"iterations": 12, "batch_size": 16, "log_every": 2, "eval_every": 6, "checkpoint_every": 4,
             "eval_batch_size": 17, "seed": 3, "milestones": (8,)}  # fmt: skip
    return Settings(**{**small, **changes})


def trainer(path, made=None, *, processes=ALONE, reporter=None, train=None, keep=False, penalty=None, **changes):
    path.mkdir(exist_ok=True, parents=True)
    return Trainer(
        model() if made is None else made,
        split(70, 0) if train is None else train,
        split(40, 1),
        CLASSES,
        settings(**changes),
        processes,
        RunDirectory(path),
        augmentation=FLIP,
        penalty=orthogonality if penalty is None else penalty,
        keep_weight_norms=keep,
        reporter=reporter,
    )


def run(path, made=None, stop=None, **options):
    prepared = trainer(path, made, **options)
    return prepared, prepared.train(stop or StopSignals())


class StopAt(Reporter):
    """Asks to leave while a step is made, as a signal would: the run saves after that step."""

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
    """The metrics without the clock."""
    found = RunDirectory(path).metrics.read()
    return [{name: value for name, value in row.items() if name != "seconds"} for row in found]
