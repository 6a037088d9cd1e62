"""A softmax bandit: the smallest policy whose score gradients are known exactly.

For each prompt the policy chooses one of N responses, π(y) = softmax((φ(y)ᵀθ + b(y)) / τ), and the score is

    s = ∇_θ log π(y) = (φ(y) − E_π φ) / τ.

E_π s = 0, so the scores of a group have nothing in common but chance, unless sampler and policy differ. Here they
differ in a controlled way: the last of the N responses has probability 1/2 and the sampler never draws it (a truncated
sampler, carried to the extreme). At θ = 0, τ = 1 the score is then φ(y) − E_sampler φ − shared · rms · u, with rms the
size of the first part and u a unit vector, and the mean within-group cosine is about shared² / (1 + shared²).
`shared` = 0 restores E s = 0.

Glossary
    paper    name         shape         equation
    θ        theta        (D,)          1
    τ        temperature  ()            –
    o_i      actions      (B, G)        1     indices into the N responses
    s_i      (scores)     (B, G, D)     8
    r        rewards      (B, N)        2     1 on the responses furthest along the prompt's own direction

Departures from the paper: the bandit is not in the paper.
"""
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bandit:
    features: Tensor                  # (B, N, D) float64
    bias: Tensor                      # (B, N)
    reachable: Tensor                 # (N,) boolean: what the sampler may draw
    rewards: Tensor                   # (B, N) 0 or 1


def make_bandit(prompts: int, generator: torch.Generator, *, responses: int = 64, dimension: int = 32,
                shared: float = 0.0, spread: float | None = None, agreement: float = 0.0) -> Bandit:
    """`prompts` different choices among `responses` + 1, of difficulties between 10 % and 90 % right.

    spread: None for one shared direction u in all prompts; else every prompt has a u of its own, and log(shared) a
    standard deviation of `spread` over prompts. agreement: cosine between the directions that prompts reward.
    """
    draw = {"generator": generator, "dtype": torch.float64}
    features = torch.randn(prompts, responses, dimension, **draw) / dimension ** 0.5
    bias = torch.randn(prompts, responses, **draw)
    common, own = torch.randn(dimension, **draw), torch.randn(prompts, dimension, **draw)
    right = agreement ** 0.5 * common + (1 - agreement) ** 0.5 * own                                    # (B, D)
    rank = torch.einsum("bnd,bd->bn", features, right).argsort(1).argsort(1) / responses
    rewards = (rank >= 0.1 + 0.8 * torch.rand(prompts, 1, **draw)).double()

    mean = torch.einsum("bn,bnd->bd", bias.softmax(1), features)
    rms = torch.einsum("bn,bnd->b", bias.softmax(1), (features - mean.unsqueeze(1)).square()).sqrt()
    direction = torch.randn(1 if spread is None else prompts, dimension, **draw)
    direction = direction / direction.norm(dim=1, keepdim=True)
    strength = shared * torch.exp((spread or 0.0) * torch.randn(prompts, **draw))
    unseen = mean + 2 * (strength * rms).unsqueeze(1) * direction                                       # (B, D)
    return Bandit(torch.cat([features, unseen.unsqueeze(1)], 1),
                  torch.cat([bias, bias.logsumexp(1, keepdim=True)], 1),
                  torch.arange(responses + 1) < responses,
                  torch.cat([rewards, torch.zeros(prompts, 1, dtype=torch.float64)], 1))


def log_policy(bandit: Bandit, theta: Tensor, temperature: float = 1.0) -> Tensor:
    """log π of every response, the unreachable one included: (B, N)."""
    return ((bandit.features @ theta + bandit.bias) / temperature).log_softmax(1)                       # Eq. 1


def sample(bandit: Bandit, theta: Tensor, size: int, generator: torch.Generator, temperature: float = 1.0) -> Tensor:
    """`size` reachable responses to each prompt: (B, size)."""
    policy = log_policy(bandit, theta, temperature).exp() * bandit.reachable
    return policy.multinomial(size, replacement=True, generator=generator)


def score_gradients(bandit: Bandit, theta: Tensor, actions: Tensor, temperature: float = 1.0) -> Tensor:
    """s = ∇_θ log π(y) of each sampled response: (B, G) -> (B, G, D)."""
    mean = torch.einsum("bn,bnd->bd", log_policy(bandit, theta, temperature).exp(), bandit.features)
    chosen = bandit.features.take_along_dim(actions.unsqueeze(-1), 1)                                   # (B, G, D)
    return (chosen - mean.unsqueeze(1)) / temperature                                                   # Eq. 8
