"""What SALT would do to one batch of your own model and data, before anything is trained.

Two numbers decide it. How much of ‖a‖² lies in the dominant subspace: the main channel drops the rest, and for
advantages that know nothing of K that share is k_t / m. And n_eff: at 1 or above nothing cancels, so α_t = 0 and the
exploration channel is shut. Both are known after one batch. The last lines say where that lies on the map of
`toy/study.py regimes`, at the scope that was asked for.

Glossary
    paper      name         shape    equation
    K          gram         (m, m)   4
    a          advantages   (m,)     12
    n_eff      n_eff        ()       6
    α_t        alpha        ()       17
    k_t / m    rank_share   ()       14
    –          kept         ()       15     ‖P_k a‖² / ‖a‖²
    D_a        d_a          ()       59     of a' = SALT's coefficients
    –          cosine       ()       –      mean ⟨g_i, g_j⟩ / (‖g_i‖ ‖g_j‖) over pairs of a group; n_eff is about
                                            1 − cosine where norms are alike and rewards know nothing of gradients

Departures from the paper: none of this is in the paper. Scope "group" gives means over the groups with a signal.
"""
import torch
from torch import Tensor

from salt.advantages import salt_advantages, scope_blocks, with_signal
from salt.geometry import update_deviation

# The map of toy/study.py regimes: SALT at both scopes in 60 cells of 16 seeds. What it lost to GRPO, in expected reward
# at one learning rate, goes with the share of ‖a‖² that P_k keeps; n_eff alone does not tell.
KEPT_MOST, KEPT_LITTLE = 0.6, 0.4
ON_THE_MAP = {
    "most": "On the map: much the same as the base algorithm (22 such cells, at most 0.040 lost).",
    "half": "On the map: the border (13 such cells; SALT lost in 10, at most 0.066, and in one with the learning rate "
            "tuned). Compare it with --salt interpolated and --salt-scope group on a short run.",
    "little": "On the map: SALT learned more slowly (85 such cells; it lost in 65, up to 0.24, and in 16 with the "
              "learning rate tuned; tuned, it won in two). If you try it: --salt interpolated or --salt-scope group, "
              "and tune --lr.",
}
COLUMNS = {"cosine": "within-group cosine", "n_eff": "n_eff", "alpha": "alpha_t", "rank_share": "k_t / m",
           "kept": "share of |a|^2 that P_k keeps", "d_a": "D_a"}


def within_group_cosine(gram: Tensor, group_size: int) -> float:
    """Mean cosine over pairs of different responses of one group: gram (m, m) -> (); 0 where no pair has features."""
    gram = gram.detach().to("cpu", torch.float64)
    norms = gram.diagonal().clamp_min(0).sqrt()
    cosines = gram / (norms.unsqueeze(1) * norms).clamp_min(torch.finfo(torch.float64).tiny)              # (m, m)
    group = torch.arange(len(gram)) // group_size
    pairs = (group.unsqueeze(1) == group) & ~torch.eye(len(gram), dtype=torch.bool)
    pairs &= (norms > 0).unsqueeze(1) & (norms > 0)
    return cosines[pairs].mean().item() if pairs.any() else 0.0


def diagnose(gram: Tensor, advantages: Tensor, group_size: int, *, scope: str | int = "mini-batch",
             signal_only: bool = False, generator: torch.Generator | None = None, **rank) -> dict[str, float]:
    """The numbers of COLUMNS, and "signal": the share of groups whose rewards differ. gram: (m, m), advantages: (m,).

    scope, and rank (rank_scale, rank_max, below_full): as in `scope_blocks` and `salt_advantages`; signal_only: the
    groups without a signal stay out of K (`with_signal`); generator: for a numeric scope. Means are over the blocks
    that have a signal. Without any signal, or with a K that is not finite, only "signal" and "finite" are there.
    """
    m = len(advantages)
    signal = (advantages.view(-1, group_size) != 0).any(1).double().mean().item()
    finite = bool(torch.isfinite(gram).all())
    if signal == 0 or not finite:
        return {"signal": signal, "finite": float(finite)}
    a = advantages.detach().to("cpu", torch.float64)
    blocks = scope_blocks(scope, m, group_size, generator)
    if signal_only:
        blocks = with_signal(blocks, a, group_size)
    found = {name: [] for name in COLUMNS if name != "cosine"}
    for block in (block for block in blocks if a[block].any()):
        part, own = gram[block][:, block], a[block]
        new = salt_advantages(part, own, **rank)
        found["n_eff"].append(new.n_eff)                                                                  # Eq. 6
        found["alpha"].append(new.alpha)                                                                  # Eq. 17
        found["rank_share"].append(new.rank / len(block))                                                 # Eq. 14
        found["kept"].append((new.main.square().sum() / own.square().sum()).item())                       # Eq. 15
        found["d_a"].append(update_deviation(part, own, new.coefficients, new.basis)["d_a"])              # Eq. 59
    return {"signal": signal, "finite": 1.0, "cosine": within_group_cosine(gram, group_size)} | {
        name: sum(values) / len(values) for name, values in found.items()}


def place_on_the_map(kept: float) -> str:
    """The key of ON_THE_MAP for a share of ‖a‖² that P_k keeps."""
    return "most" if kept >= KEPT_MOST else "half" if kept >= KEPT_LITTLE else "little"


def in_words(found: dict[str, float]) -> list[str]:
    """Where the numbers of `diagnose` lie on the map: a sentence for each of the two axes, and what was found there."""
    if not found["finite"]:
        return ["K is not finite: SALT would leave the advantages as they are."]
    if not found["signal"]:
        return ["No group has rewards that differ: a is 0 and there is nothing to reweight. Take easier or harder "
                "problems, or more responses per prompt."]
    alpha, kept = found["alpha"], found["kept"]
    what, so = (("Nothing cancels", "SALT is P_k a alone") if alpha < 0.005 else
                ("Updates cancel", "the exploration channel is open") if found["n_eff"] < 1 else
                ("Updates cancel in some blocks, not on average", "the exploration channel is open in those"))
    first = f"{what} (n_eff {found['n_eff']:.2f}): alpha_t is {alpha:.2f} and {so}."
    second = f"P_k keeps {kept:.0%} of |a|^2 with {found['rank_share']:.0%} of the directions."
    return [first, second, ON_THE_MAP[place_on_the_map(kept)]]


def report(gram: Tensor, advantages: Tensor, group_size: int, *, scope: str | int = "mini-batch",
           signal_only: bool = False, generator: torch.Generator | None = None, **rank) -> str:
    """The text that `train.py --diagnose` prints: the asked scope and, beside it, the other of mini-batch and group.

    Arguments as those of `diagnose`."""
    other = "group" if scope == "mini-batch" else "mini-batch"
    found = {name: diagnose(gram, advantages, group_size, scope=name, signal_only=signal_only, generator=generator,
                            **rank) for name in (scope, other)}
    lines = [f"{len(advantages)} responses in groups of {group_size}; {found[scope]['signal']:.0%} of the groups have "
             "a signal", f"{'':32}" + "".join(f"{'scope ' + str(name):>18}" for name in found)]
    if "n_eff" in found[scope]:
        lines += [f"{label:32}" + "".join(f"{found[name][key]:18.3f}" for name in found)
                  for key, label in COLUMNS.items()]
    return "\n".join([*lines, *in_words(found[scope])])
