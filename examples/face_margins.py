"""Compare the margin losses of face recognition by verification of pairs of images of unseen classes.

Embedded digits (mnist5k): 0 to 5 are learned with some wrong labels, pairs of 6 to 8 are verified. All losses share
the network, the head (with three directions per class for sub-center ArcFace) and the batches. The equal error rate is
the rate at which as many pairs of one class are rejected as pairs of different classes are accepted.

    python examples/face_margins.py         about two minutes on one core
"""

import argparse
import statistics

import torch

import spherenet as sn
from spherenet.data import load_dataset

LOSSES = {
    "softmax": {},
    "arcface": {"m": 0.3},
    "adaface": {"m": 0.3},
    "magface": {"m": 0.2, "largest_m": 0.4, "smallest_norm": 1.0, "largest_norm": 20.0, "norm_weight": 1.0},
    "curricularface": {"m": 0.3},
    "elasticface": {"m": 0.3},
    "subcenter-arcface": {"m": 0.3, "subcenters": 3},
    "uniface": {"m": 0.2, "s": 16.0},
}
LEARNED, MOST = 6, 1000  # classes for training; images for verification

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--iterations", type=int, default=200, help="steps of 64 images")
parser.add_argument("--noise", type=float, default=0.2, help="fraction of wrong labels")
parser.add_argument("--seeds", type=int, default=3, help="at least 2")
args = parser.parse_args()
data, cpu = load_dataset("mnist5k"), torch.device("cpu")
is_learned = data.train.labels < LEARNED
learned, unseen = is_learned.nonzero().flatten(), (~is_learned).nonzero().flatten()[:MOST]
first, second = torch.randint(len(unseen), (2, 4000), generator=torch.Generator().manual_seed(0))
images, labels, _ = next(data.train.batches([(0, unseen)], device=cpu, augmentation=None))
shape = {"widths": (16, 24, 32), "in_channels": images.shape[1], "input_size": tuple(images.shape[2:])}
print(f"equal error rate %, {args.iterations} iterations, {args.noise:.0%} wrong labels, n = {args.seeds} seeds")
for name, options in LOSSES.items():
    rates = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        model = sn.create_model("cnn-3", LEARNED, "sigmoid", loss=name, loss_options=options, **shape)
        optimizer = torch.optim.Adam(sn.param_groups(model, weight_decay=5e-4), lr=1e-3)
        order = ((0, learned[torch.randint(len(learned), (64,))]) for _ in range(args.iterations))
        for batch in data.train.batches(order, device=cpu, augmentation=None):
            wrong = torch.rand(len(batch.labels)) < args.noise
            noisy = torch.where(wrong, torch.randint(LEARNED, batch.labels.shape), batch.labels)
            model(batch.images, noisy, return_scores=False).backward()
            optimizer.step()
            optimizer.zero_grad()
        features = model.eval().requires_grad_(False).features(images)
        similarities = sn.pair_similarities(features[first], features[second])
        rates.append(100 * sn.equal_error_rate(similarities, labels[first] == labels[second]))
    print(f"{name:<20}{statistics.mean(rates):5.1f} ± {statistics.stdev(rates):.1f}", flush=True)
