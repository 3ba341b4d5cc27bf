"""Learn features of digits from pairs of images, with and without labels, and search images of unseen classes.

Embedded digits (mnist5k): 0 to 5 are learned, 6 to 9 are searched (recall@1). Losses with labels see the classes of a
batch; those of views see two views of each image, shifted and with noise. "simplex" is a head with fixed directions.
Angles in degrees are those of the learned classes: within a class and between the means of two classes.

    python examples/pairs.py                about one minute on one core
"""

import argparse
import math
import statistics

import torch

import spherenet as sn
from spherenet.data import load_dataset

OF_LABELS = {"SupCon": sn.SupConLoss, "prototypical": sn.PrototypicalLoss, "simplex": lambda: sn.make_loss("s-cosine")}
OF_VIEWS = {
    "NT-Xent": lambda: sn.InfoNCELoss(0.1, negatives="all"),
    "SigLIP": sn.SigLIPLoss,
    "alignment, uniformity": sn.AlignmentUniformityLoss,
}
LEARNED, MOST = 6, 400  # classes for training; about as many images for each evaluation

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--iterations", type=int, default=100, help="steps of 64 images")
parser.add_argument("--seeds", type=int, default=3, help="at least 2")
args = parser.parse_args()
data, cpu = load_dataset("mnist5k"), torch.device("cpu")
learned, unseen = ((data.train.labels < LEARNED) == known for known in (True, False))
learned, unseen = learned.nonzero().flatten(), unseen.nonzero().flatten()
samples = [x[:: len(x) // MOST] for x in (learned, unseen)]  # images are sorted by class
seen, new = (next(data.train.batches([(0, x)], device=cpu, augmentation=None)) for x in samples)
shape = {"widths": (8, 12, 16), "in_channels": new.images.shape[1], "input_size": tuple(new.images.shape[2:])}
print(f"recall@1 %, angles within and between classes, {args.iterations} iterations, n = {args.seeds} seeds")
for name, make in (OF_LABELS | OF_VIEWS).items():
    results = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        criterion, network = make(), sn.create_model("cnn-3", LEARNED, "sigmoid", **shape).features
        head = sn.FixedHead.etf(network.out_features, LEARNED) if name == "simplex" else torch.nn.Identity()
        optimizer = torch.optim.Adam([*network.parameters(), *criterion.parameters()], lr=1e-3)
        order = ((0, learned[torch.randint(len(learned), (64,))]) for _ in range(args.iterations))
        for images, labels, _ in data.train.batches(order, device=cpu, augmentation=None):
            if name in OF_VIEWS:
                shifts = torch.randint(-2, 3, (2, 2)).tolist()
                views = [images.roll(shift, (2, 3)) + 0.2 * torch.randn_like(images) for shift in shifts]
                criterion(*map(network, views)).backward()
            else:
                criterion(head(network(images)), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        network.eval().requires_grad_(False)
        angles = sn.neural_collapse(network(seen.images), seen.labels)
        degrees = math.degrees(angles.within_class_angle), math.degrees(angles.between_class_angle)
        results.append((100 * sn.recall_at_k(network(new.images), new.labels), *degrees))
    numbers = [f"{statistics.mean(x):6.1f} ± {statistics.stdev(x):.1f}" for x in zip(*results, strict=True)]
    print(f"{name:<22}{''.join(numbers)}", flush=True)
