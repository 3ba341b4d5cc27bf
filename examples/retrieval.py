"""Retrieve images of classes that the network was not trained on: six classes for training, four for retrieval.

Embedded digits (mnist5k): 0 to 5 are learned, 6 to 9 are retrieved. Recall@1 is the percentage of images whose nearest
other image, by the angle between their 256 features, has the same class. The first row uses pixels without a network as
a baseline. CNN, SphereNet and SphereNet with the paper's GA-Softmax share one definition and see the same batches.

    python examples/retrieval.py            about two minutes on one core
    python examples/retrieval.py --data cifar10      downloads CIFAR-10 if necessary
"""

import argparse
import statistics

import torch
from torch import Tensor
from torch.nn import functional as F

import spherenet as sn
from spherenet.data import load_dataset

NETWORKS = {"CNN": (None, False), "SphereNet": ("sigmoid", False), "SphereNet + GA": ("sigmoid", True)}
LEARNED, MOST = 6, 2000  # classes for training; images for retrieval


def recall_at_1(features: Tensor, labels: Tensor) -> float:
    """Return the percentage of features [N, F] whose nearest other feature has the same label."""
    similarity = F.normalize(features) @ F.normalize(features).T
    nearest = similarity.fill_diagonal_(-2).argmax(1)
    return 100 * (labels[nearest] == labels).double().mean().item()


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", choices=["mnist5k", "cifar10"], default="mnist5k")
parser.add_argument("--iterations", type=int, default=200, help="steps of 64 images")
parser.add_argument("--seeds", type=int, default=3, help="at least 2")
args = parser.parse_args()
data, cpu = load_dataset(args.data), torch.device("cpu")
is_learned = data.train.labels < LEARNED
learned, unseen = is_learned.nonzero().flatten(), (~is_learned).nonzero().flatten()[:MOST]
images, labels, _ = next(data.train.batches([(0, unseen)], device=cpu, augmentation=None))
print(f"recall@1 % of {len(unseen)} images of unseen classes, {args.iterations} iterations, n = {args.seeds} seeds")
print(f"{'pixels':<16}{recall_at_1(images.flatten(1), labels):5.1f}")
shape = {"widths": (16, 24, 32), "in_channels": images.shape[1], "input_size": tuple(images.shape[2:])}
for name, (operator, margin) in NETWORKS.items():
    recalls = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        annealing = sn.Annealing.for_run(args.iterations)
        loss = sn.GASoftmaxLoss.paper(annealing=annealing) if margin else "softmax"  # m = 4
        model = sn.create_model("cnn-3", LEARNED, operator, loss=loss, **shape)
        optimizer = torch.optim.Adam(sn.param_groups(model, weight_decay=5e-4), lr=1e-3)
        order = ((0, learned[torch.randint(len(learned), (64,))]) for _ in range(args.iterations))
        for step, batch in enumerate(data.train.batches(order, device=cpu, augmentation=None)):
            if margin:
                model.criterion.set_step(step)
            model(batch.images, batch.labels)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        recalls.append(recall_at_1(model.eval().requires_grad_(False).features(images), labels))
    print(f"{name:<16}{statistics.mean(recalls):5.1f} ± {statistics.stdev(recalls):.1f}", flush=True)
