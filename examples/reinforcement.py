"""CartPole with REINFORCE: a plain policy and a SphereNet policy in the same training loop.

Both get the four observations, scaled to about 1, and a constant 1, because a direction alone does not distinguish a
fast pole from a slow one. The logits of the SphereNet are β·cos θ + γ with a learned scale β. Requires gymnasium.

    python examples/reinforcement.py        about three minutes on one core
"""

import argparse
import statistics

import gymnasium
import torch
from torch import Tensor, nn

import spherenet as sn

POLES, DISCOUNT, SCALES = 16, 0.99, torch.tensor([2.4, 2.0, 0.2, 2.0])


def play(policy: nn.Module, poles: gymnasium.vector.VectorEnv, seed: int) -> tuple[Tensor, ...]:
    """Return one episode per pole: features [T, POLES, 5], actions [T, POLES], whether poles stand [T, POLES]."""
    observed, standing, steps = poles.reset(seed=seed)[0], torch.ones(POLES, dtype=torch.bool), []
    while standing.any():
        x = torch.cat([torch.as_tensor(observed) / SCALES, torch.ones(POLES, 1)], 1)
        actions = torch.distributions.Categorical(logits=policy(x)).sample()
        steps.append((x, actions, standing))
        observed, _, fell, timed_out, _ = poles.step(actions.numpy())
        standing = standing & ~torch.as_tensor(fell | timed_out)
    return tuple(map(torch.stack, zip(*steps, strict=True)))


def train(layer: type[nn.Module], options: dict[str, str], seed: int, updates: int) -> list[float]:
    """Return the mean episode length per quarter; the baseline is the mean return of all poles at the same step."""
    torch.manual_seed(seed)
    policy = nn.Sequential(layer(5, 32, **options), nn.Tanh(), layer(32, 2, **options))
    poles = gymnasium.make_vec("CartPole-v1", num_envs=POLES, vectorization_mode="vector_entry_point")
    optimizer, lengths = torch.optim.Adam(policy.parameters(), lr=0.02), []
    for update in range(updates):
        x, actions, standing = play(policy, poles, 1000 * seed + update)
        weight = DISCOUNT ** torch.arange(len(x)).unsqueeze(1)
        returns = (standing * weight).flip(0).cumsum(0).flip(0) / weight
        gain = returns - returns.sum(1, keepdim=True) / standing.sum(1, keepdim=True)
        log_probability = policy(x).log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        (-(log_probability * gain)[standing].mean() / gain[standing].std().clamp_min(1e-6)).backward()
        optimizer.step()
        optimizer.zero_grad()
        lengths.append(standing.sum().item() / POLES)
    return [statistics.mean(lengths[q * updates // 4 : (q + 1) * updates // 4]) for q in range(4)]


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--updates", type=int, default=32, help="at least 4")
parser.add_argument("--seeds", type=int, default=5, help="at least 2")
updates, seeds = vars(parser.parse_args()).values()
print(f"mean length of an episode (at most 500) in each quarter of {updates} updates, n = {seeds} seeds")
for name, layer, options in (("plain", nn.Linear, {}), ("SphereNet", sn.SphereLinear, {"rescale": "learned"})):
    runs = [train(layer, options, seed, updates) for seed in range(seeds)]
    cells = (f"{statistics.mean(q):5.0f} ± {statistics.stdev(q):3.0f}" for q in zip(*runs, strict=True))
    print(f"{name:<11}{'  '.join(cells)}   last quarter per seed:", *(f"{run[-1]:.0f}" for run in runs), flush=True)
