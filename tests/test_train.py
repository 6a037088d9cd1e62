"""The training loop: gradients that no memory flag changes, SALT as one replaceable call, DAPO, what each flag does."""
import dataclasses
import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import train
from salt import config as configuration
from salt import models
from salt.advantages import VARIANTS, Reweighted
from salt.errors import UserError
from salt.geometry import head_gradient_norm
from salt.metrics import RunDirectory
from salt.reward import RewardPool
from salt.rollout import Rollouts
from toy.arithmetic import WarmStart, make_model
from training import ROOT, SMALL, Reward, lines, resume, run


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    """curves.png takes three quarters of so short a run."""
    monkeypatch.setattr(RunDirectory, "draw", lambda run_directory: None)


# ---- one update on made-up responses


@pytest.fixture(scope="module")
def batch():
    """64 responses of 0 to 11 tokens (one empty, one of a single token) to 8 prompts, with coefficients."""
    draw = torch.Generator().manual_seed(1)
    lengths = [0, 1, 11, *torch.randint(1, 12, (61,), generator=draw).tolist()]
    prompts = [torch.randint(2, 23, (3 + i // 8,), generator=draw).tolist() for i in range(64)]
    responses = [torch.randint(1, 23, (length,), generator=draw).tolist() for length in lengths]
    return SimpleNamespace(rollouts=Rollouts(prompts, responses, [True] * 64, [""] * 64),
                           coefficients=torch.randn(64, generator=draw))


def small_model(dtype=torch.float64):
    torch.manual_seed(0)
    return make_model(WarmStart(hidden=32, layers=2), 23).to(dtype).eval()


def config_of(**changes) -> train.Config:
    return dataclasses.replace(configuration.settle({"output": "unused"}), **{"max_grad_norm": 1e9} | changes)


def one_update(model, config, batch, *, moved=0.3, reference=True, first=False, head_check=False):
    """train.update without moving the weights -> (statistics, the gradient of all parameters as one vector)."""
    draw = torch.Generator().manual_seed(2)
    scored = models.score(model, batch.rollouts, config.temperature)
    old = models.unpack(scored.logprobs, scored.lengths)
    noise = [moved * torch.randn(old.shape, generator=draw, dtype=torch.float64).to(old) for _ in range(2)]
    stats = train.update(config, model, torch.optim.SGD(model.parameters(), lr=0.0), batch.rollouts, batch.coefficients,
                         old + noise[0], old + noise[1] if reference else None, seed=3, first=first,
                         head_check=head_check)
    return stats, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


TERMS = {"policy": {}, "entropy": {"regularizer": "entropy", "entropy_coef": 0.1},
         "clip-cov": {"regularizer": "clip-cov", "clip_cov_ratio": 0.2, "clip_cov_low": 0.05, "clip_low": 1.0,
                      "clip_high": 1.0},
         "kl-cov": {"regularizer": "kl-cov", "kl_cov_ratio": 0.2}}


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("aggregation", ["sequence-mean", "token-mean"])
@pytest.mark.parametrize("terms", TERMS)
def test_the_gradient_does_not_depend_on_the_micro_batch(batch, dtype, tolerance, aggregation, terms):
    model = small_model(dtype)
    config = config_of(aggregation=aggregation, kl_coef=0.1, **TERMS[terms])
    first = terms == "kl-cov"                          # the others score the mini-batch again, in micro-batches as well
    whole, expected = one_update(model, dataclasses.replace(config, micro_batch=1000), batch, first=first)
    assert expected.norm() > 1e-3 and 0 < whole["clip_fraction"] + (terms == "kl-cov") and whole["kl"] > 0
    for size in (1, 7, 64):
        stats, gradient = one_update(model, dataclasses.replace(config, micro_batch=size), batch, first=first)
        assert (gradient - expected).norm() <= tolerance * expected.norm()
        assert stats == pytest.approx(whole, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("terms", ["entropy", "clip-cov", "kl-cov"])
def test_every_term_reaches_the_gradient(batch, terms):
    model = small_model()
    base = {key: value for key, value in TERMS[terms].items() if key.startswith("clip_") and "cov" not in key}
    _, without = one_update(model, config_of(kl_coef=0.0, **base), batch)
    _, with_it = one_update(model, config_of(kl_coef=0.0, **TERMS[terms]), batch)
    _, with_kl = one_update(model, config_of(kl_coef=0.1, **base), batch)
    assert (with_it - without).norm() > 1e-3 * without.norm()
    assert (with_kl - without).norm() > 1e-3 * without.norm()


def identity_error(model, batch, config, *, gram_config=None, predicted_aggregation=None) -> float:
    """|‖∂L/∂W_out‖ − sqrt(a'ᵀKa'/m)| / predicted, at ratio 1 and in micro-batches of 7."""
    stats, _ = one_update(model, config, batch, moved=0.0, reference=False, first=True, head_check=True)
    scored = models.score(model, batch.rollouts, (gram_config or config).temperature, keep_hidden=True)
    gram = train.form_gram(gram_config or config, models.lm_head(model), scored, len(scored.lengths), step=1)
    predicted = head_gradient_norm(gram, batch.coefficients, scored.lengths, length_norm=config.length_norm,
                                   aggregation=predicted_aggregation or config.aggregation)
    assert predicted > 1e-3
    return abs(stats["head_gradient"] - predicted) / predicted


@pytest.mark.parametrize("aggregation", ["sequence-mean", "token-mean"])
@pytest.mark.parametrize("length_norm", ["mean", "sum"])
def test_the_head_gradient_has_the_norm_that_the_gram_predicts(batch, aggregation, length_norm):
    config = config_of(aggregation=aggregation, length_norm=length_norm, micro_batch=7, temperature=0.6)
    assert identity_error(small_model(), batch, config) <= 1e-12


def test_the_identity_sees_a_wrong_temperature_aggregation_or_denominator(batch, monkeypatch):
    model, config = small_model(), config_of(micro_batch=7, temperature=0.6)
    assert identity_error(model, batch, config, gram_config=dataclasses.replace(config, temperature=1.0)) > 0.1
    assert identity_error(model, batch, config, predicted_aggregation="token-mean") > 0.01
    policy_loss = train.policy_loss
    monkeypatch.setattr(train, "policy_loss", lambda *args, **options: policy_loss(*args, **options | {
        "denominator": None}))                                              # each micro-batch with a mean of its own
    assert identity_error(model, batch, config) > 1                         # 10 means of 7 instead of one of 64


def test_the_gradient_is_clipped_and_its_norm_logged_as_it_was(batch):
    model = small_model()
    free, gradient = one_update(model, config_of(), batch)
    clipped, shortened = one_update(model, config_of(max_grad_norm=1e-3), batch)
    assert free["grad_norm"] == clipped["grad_norm"] == pytest.approx(gradient.norm().item())
    assert shortened.norm().item() == pytest.approx(1e-3, rel=1e-3)


# ---- whole runs


@pytest.fixture
def updates(monkeypatch):
    """Every call of train.update: its coefficients and old log-probabilities."""
    seen, original = [], train.update

    def recorded(config, model, optimizer, rollouts, coefficients, old, reference, **options):
        seen.append(SimpleNamespace(rollouts=rollouts, coefficients=coefficients.clone(), old=old.clone()))
        return original(config, model, optimizer, rollouts, coefficients, old, reference, **options)

    monkeypatch.setattr(train, "update", recorded)
    return seen


def untouched(gram, advantages, blocks, variant, **_) -> Reweighted:
    zero, ones, basis = torch.zeros_like(advantages), torch.ones(len(blocks)), torch.zeros(len(advantages), 1)
    return Reweighted(advantages, advantages, zero, 0 * ones, ones, ones, ones, basis, ones > 0)


def test_without_salt_nothing_of_it_is_left(tiny_folder, tmp_path, monkeypatch):
    """Three steps: plain, plain without diagnostics, SALT's call replaced by the identity, and SALT."""
    steps = ("--steps", "3")
    plain = run(tiny_folder, tmp_path / "plain", *steps)
    quiet = run(tiny_folder, tmp_path / "quiet", *steps, "--diagnostics", "off")
    acting = run(tiny_folder, tmp_path / "acting", *steps, "--salt")
    monkeypatch.setattr(train, "reweight", untouched)
    identity = run(tiny_folder, tmp_path / "identity", *steps, "--salt")
    assert len(plain) == 3
    for a, b, c, d in zip(plain, quiet, identity, acting, strict=True):
        assert b == {key: a[key] for key in b} and {"loss", "grad_norm", "entropy"} <= set(b)
        assert a == {key: c[key] for key in a}
        assert d != {key: c[key] for key in d}
    weights = [load_file(tmp_path / name / "final" / "model.safetensors")["lm_head.weight"]
               for name in ("plain", "quiet", "identity", "acting")]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])


def test_each_step_logs_what_the_readme_promises(tiny_folder, tmp_path):
    record = run(tiny_folder, tmp_path / "run", "--salt", "--steps", "1")[0]
    wanted = {"step", "reward", "pass_rate", "length", "truncated", "entropy", "kl", "clip_fraction", "grad_norm",
              "alpha", "rank", "pr_in", "pr_total", "n_eff_in", "n_eff_total", "n_eff_out", "r_in", "r_total", "d_a",
              "d_g", "u_perp_gain", "no_signal_share", "kept", "exploration"}
    assert wanted <= set(record)
    assert all(record[key] is not None for key in wanted)
    assert 0 <= record["alpha"] <= 1 <= record["rank"] <= 8                          # 2 prompts · 4 responses
    system = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["system"]
    assert {"sample", "score", "reward", "geometry", "update", "total"} <= set(system["seconds"])


def test_the_micro_batch_changes_the_log_by_rounding_only(tiny_folder, tmp_path):
    a, b = (run(tiny_folder, tmp_path / size, "--salt", "--micro-batch", size) for size in ("3", "100"))
    for left, right in zip(a, b, strict=True):
        assert left == pytest.approx(right, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_trains(tiny_folder, tmp_path, variant, updates):
    record = run(tiny_folder, tmp_path / "run", "--salt", variant, "--steps", "1")[0]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["salt"] == variant and record["grad_norm"] > 0
    assert all(torch.isfinite(update.coefficients).all() for update in updates)
    # Nothing cancels on this model (n_eff > 1): alpha is 0, and the exploration channel alone is silent.
    assert any(update.coefficients.any() for update in updates) or (variant, record["alpha"]) == ("only-exp", 0)


@pytest.mark.parametrize("flags, blocks", [(["--salt-scope", "mini-batch"], 1), (["--salt-scope", "group"], 2),
                                           (["--salt-scope", "8"], 1), (["--salt-scope", "4"], 2),
                                           (["--salt-scope", "1"], 8), (["--salt-preset", "paper"], 1),
                                           (["--salt-preset", "released-code"], 1)])
def test_scopes_and_presets(tiny_folder, tmp_path, monkeypatch, flags, blocks):
    seen, original = [], train.reweight
    monkeypatch.setattr(train, "reweight", lambda *args, **options: seen.append((args, options)) or original(
        *args, **options))
    record = run(tiny_folder, tmp_path / "run", "--salt", *flags, "--steps", "1")[0]
    (gram, _, parts, variant), options = seen[0]
    assert len(parts) == blocks and variant == "salt" and gram.shape == (8, 8)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    released = flags[1] == "released-code"
    assert (config["length_norm"], config["aggregation"]) == (
        ("sum", "token-mean") if released else ("mean", "sequence-mean"))
    assert (options["rank_max"], options["below_full"]) == ((64, True) if released else (None, False))
    assert record["rank"] <= 8 / blocks - released                             # below_full: k ≤ m − 1 = 7


def test_groups_without_a_signal_can_stay_out_of_k(tiny_folder, tmp_path, updates):
    """In each mini-batch the first prompt's responses are all wrong, every other one of the second's is right."""
    shares = []
    for name, flags in (("kept", []), ("left-out", ["--salt-signal-only"])):
        verdicts = itertools.cycle([0, 0, 0, 0, 1, 0, 1, 0])
        record = run(tiny_folder, tmp_path / name, "--salt", *flags, "--steps", "1",
                     pool=Reward(lambda _: next(verdicts)))[0]
        shares.append(record["no_signal_share"])
    assert shares[0] > 0 and shares[1] == 0
    assert [bool(update.coefficients[:4].any()) for update in updates] == [True, True, False, False]
    assert all(update.coefficients[4:].any() for update in updates)


@pytest.mark.parametrize("flags", [["--regularizer", "entropy"], ["--regularizer", "clip-cov"],
                                   ["--regularizer", "kl-cov"],
                                   ["--aggregation", "token-mean", "--temperature", "2"],
                                   ["--temperature", "1.3"], ["--kl-coef", "0"],
                                   ["--algo", "dapo", "--gen-batch", "4"]])
def test_every_other_switch_changes_the_training(tiny_folder, tmp_path, flags):
    """By the second step: Clip-Cov and KL-Cov are nearly inert on the first update."""
    flags = flags + ["--clip-cov-low", "0.01"] if "clip-cov" in flags else flags
    for name, extra in (("plain", ["--temperature", "2"] if "token-mean" in flags else []), ("changed", flags)):
        run(tiny_folder, tmp_path / name, *extra)
    a, b = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("plain", "changed"))
    assert any(not torch.equal(a[key], b[key]) for key in a)


def test_two_updates_per_step_use_one_scoring_pass(tiny_folder, tmp_path, updates):
    """4 prompts in mini-batches of 2: the second update's old log-probabilities are those of before the first."""
    record = run(tiny_folder, tmp_path / "run", "--steps", "1")[0]
    assert len(updates) == 2 and all(len(u.rollouts.responses) == 8 for u in updates)
    assert record["ratio_minus_one"] > 0                                  # so the second one sees a policy that moved
    assert run(tiny_folder, tmp_path / "one", "--steps", "1", "--mini-batch", "4")[0]["ratio_minus_one"] < 1e-5


def test_equal_rewards_leave_the_weights_to_the_weight_decay(tiny_folder, tmp_path, updates):
    flags = ("--salt", "--steps", "1", "--mini-batch", "4", "--lr", "0.1", "--weight-decay", "0.5", "--kl-coef", "0")
    record = run(tiny_folder, tmp_path / "run", *flags, pool=Reward(lambda text: True))[0]
    assert record["pass_rate"] == record["all_right"] == 1 and record["all_wrong"] == 0
    assert not updates[0].coefficients.any()
    before = load_file(tiny_folder / "model.safetensors")
    for name, after in load_file(tmp_path / "run" / "final" / "model.safetensors").items():
        assert torch.allclose(after, before[name] * (1 - 0.1 * 0.5), rtol=1e-6, atol=1e-8)   # AdamW: w(1 − lr·decay)


def test_a_group_of_one_has_no_advantage(tiny_folder, tmp_path, updates):
    run(tiny_folder, tmp_path / "run", "--salt", "--group-size", "1", "--steps", "1")
    assert not any(u.coefficients.any() for u in updates)


@pytest.mark.parametrize("diagnostics", ["on", "off"])
def test_a_gram_with_nan_is_passed_over_and_counted(tiny_folder, tmp_path, monkeypatch, updates, diagnostics):
    """The first mini-batch of each step has no K: its advantages stay, the other's are reweighted."""
    original, calls = train.lm_head_gram, []

    def half_broken(*args, **options):
        calls.append(None)
        gram = original(*args, **options)
        return torch.full_like(gram, torch.nan) if len(calls) % 2 else gram

    monkeypatch.setattr(train, "lm_head_gram", half_broken)
    records = run(tiny_folder, tmp_path / "broken", "--salt", "--diagnostics", diagnostics)
    broken = updates[:]
    del updates[:]
    monkeypatch.setattr(train, "lm_head_gram", original)
    run(tiny_folder, tmp_path / "plain", "--steps", "1")
    assert torch.equal(broken[0].coefficients, updates[0].coefficients) and broken[0].coefficients.any()
    assert not torch.equal(broken[1].coefficients, updates[1].coefficients)
    assert len(records) == 2 and [record.get("gram_not_finite") for record in records] == [0.5, 0.5]


def test_a_reward_worker_that_dies_is_replaced(tiny_folder, tmp_path):
    class Mortal(RewardPool):
        def submit(self, texts, answers):
            worker = self._idle.get()
            worker.process.kill()
            self._idle.put(worker)
            return super().submit(texts, answers)

    with Mortal("math", workers=1, timeout=5) as pool:
        records = run(tiny_folder, tmp_path / "run", pool=pool)
    assert len(records) == 2 and pool.restarts == 2
    logged = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["system"]["reward_restarts"] for line in logged] == [1, 2]


def test_evaluation_before_every_n_steps_and_after(tiny_folder, tmp_path, capsys):
    flags = ("--steps", "3", "--eval-every", "2", "--eval-limit", "4", "--eval-samples", "2")
    records = run(tiny_folder, tmp_path / "run", *flags)
    assert [record["step"] for record in records if "eval_pass@1" in record] == [0, 2, 3]
    assert records[0]["eval_samples"] == 8 and set(records[0]) & {"loss", "reward"} == set()
    said = capsys.readouterr().out
    assert "pass@1" in said and "pass@2" in said and "after step 3" in said
    assert [{key: value for key, value in record.items() if "eval" not in key} for record in records[1:]] == run(
        tiny_folder, tmp_path / "without", "--steps", "3")                  # evaluating disturbs nothing


@pytest.mark.slow
def test_adapters_train_and_leave_an_ordinary_model(tiny_folder, tmp_path):
    """The head stays, the projections move, and the reference is the model with its adapters off."""
    records = run(tiny_folder, tmp_path / "run", "--lora-rank", "4", "--lr", "1e-2", "--salt", "--mini-batch", "4")
    assert abs(records[0]["kl"]) < 1e-9 < records[1]["kl"]
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_folder, tmp_path / "run" / "final"))
    assert before.keys() == after.keys() and torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    assert not torch.equal(*(found["model.layers.0.mlp.up_proj.weight"] for found in (before, after)))


@pytest.mark.slow
def test_adapters_resume(tiny_folder, tmp_path):
    flags = ["--lora-rank", "4", "--lr", "1e-2", "--save-every", "1"]
    whole = run(tiny_folder, tmp_path / "whole", *flags, "--steps", "3")
    run(tiny_folder, tmp_path / "part", *flags, "--steps", "2")
    assert resume(tmp_path / "part", "--steps", "3") == whole


@pytest.mark.slow
def test_a_tracker_gets_the_log(tiny_folder, tmp_path):
    run(tiny_folder, tmp_path / "run", "--tracker", "tensorboard")
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))


def test_sampled_responses_are_written_every_n_steps_and_at_the_end(tiny_folder, tmp_path):
    run(tiny_folder, tmp_path / "run", "--samples-every", "2", "--steps", "3", "--salt")
    tables = sorted(path.name for path in (tmp_path / "run" / "samples").iterdir())
    assert tables == ["step-000002.jsonl", "step-000003.jsonl"]
    row = json.loads((tmp_path / "run" / "samples" / tables[0]).read_text().splitlines()[0])
    assert {"prompt", "completion", "reward", "advantage", "coefficient"} == row.keys() and "=" in row["prompt"]


@pytest.mark.parametrize("flags", ["", "--algo dapo --gen-batch 6 --salt --salt-scope group"])
def test_diagnose_draws_one_batch_and_leaves_nothing(tiny_folder, tmp_path, capsys, updates, flags):
    main = ["--model", str(tiny_folder), *SMALL, "--output", str(tmp_path / "run"), "--diagnose", *flags.split()]
    assert train.main(main, pool=Reward()) == 0
    said = capsys.readouterr().out
    assert "8 responses in groups of 4" in said and "share of |a|^2 that P_k keeps" in said and "P_k keeps" in said
    assert not updates and not (tmp_path / "run").exists()


# ---- DAPO


def drawn(name: str, groups: int) -> tuple[Rollouts, list[str]]:
    """A generation batch of groups of two: prompt, response and text tell them apart."""
    names = [f"{name}{group}" for group in range(groups) for _ in range(2)]
    return Rollouts([[1]] * len(names), [[2]] * len(names), [True] * len(names),
                    [f"{text}.{i % 2}" for i, text in enumerate(names)]), [""] * len(names)


DAPO = SimpleNamespace(batch_size=3, group_size=2, max_gen_batches=3, gen_batch=4)


def test_dynamic_sampling_keeps_mixed_groups_and_throws_the_rest_away():
    """a0 … a3 drawn, a0 all right: three are left, and b is not needed. Then b0 … b3, of which one is too many."""
    pool = Reward(lambda text: text.endswith(".1") or text.startswith("a0"))
    batches = iter([drawn("a", 4), drawn("b", 4)])
    taken, verdicts, judged = train.sample_mixed_groups(DAPO, lambda attempt: next(batches), pool)
    assert taken.texts == ["a1.0", "a1.1", "a2.0", "a2.1", "a3.0", "a3.1"] and verdicts == [0, 1] * 3
    assert judged == [1, 1, 0, 1, 0, 1, 0, 1]
    taken, verdicts, judged = train.sample_mixed_groups(DAPO, lambda attempt: next(batches), pool)
    assert taken.texts[-1] == "b2.1" and verdicts == [0, 1] * 3 and judged == [0, 1] * 4


def test_dynamic_sampling_goes_on_until_a_batch_is_full():
    pool = Reward(lambda text: text.endswith(".1") or text[1] in "012")
    attempts = []
    taken, verdicts, judged = train.sample_mixed_groups(
        DAPO, lambda attempt: attempts.append(attempt) or drawn("abc"[attempt], 4), pool)
    assert attempts == [0, 1, 2] and taken.texts == ["a3.0", "a3.1", "b3.0", "b3.1", "c3.0", "c3.1"]
    assert len(judged) == 24


@pytest.mark.parametrize("verdict", [True, False])
def test_dynamic_sampling_gives_up_after_so_many_batches(verdict):
    attempts = []
    with pytest.raises(UserError, match="0 of 3 groups .* in 3 generation batches of 4 prompts"):
        train.sample_mixed_groups(DAPO, lambda attempt: attempts.append(attempt) or drawn("a", 4),
                                  Reward(lambda text: verdict))
    assert attempts == [0, 1, 2]


def test_dapo_trains_on_mixed_groups_with_rewards_of_plus_and_minus_one(tiny_folder, tmp_path, updates):
    records = run(tiny_folder, tmp_path / "run", "--algo", "dapo", "--gen-batch", "6", "--steps", "3", "--lr", "1e-4")
    assert len(updates) == 6
    for update in updates:
        right = torch.tensor(["7" in text for text in update.rollouts.texts]).view(2, 4)
        assert (right.any(1) & ~right.all(1)).all()
        assert torch.equal(update.coefficients.view(2, 4) > 0, right)
    for record, (first, second) in zip(records, zip(updates[::2], updates[1::2]), strict=True):
        share = sum("7" in text for u in (first, second) for text in u.rollouts.texts) / 16
        assert record["reward"] == pytest.approx(2 * share - 1)                       # +1 and −1
        assert record["all_right"] + record["all_wrong"] > 0 and "kl" not in record         # of all that were drawn
    for record in records:                                          # a mixed group of four has at most three right
        mixed = 1 - record["all_right"] - record["all_wrong"]
        assert record["pass_rate"] <= record["all_right"] + 0.75 * mixed + 1e-6
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["clip_low"], config["clip_high"], config["kl_coef"]) == (0.2, 0.28, 0)


def test_dapo_that_ends_with_its_problems_still_saves_and_evaluates(tiny_folder, tmp_path):
    """How many steps the problems last is not known beforehand, so the last step is one like any other."""
    flags = ("--algo dapo --gen-batch 4 --limit 8 --epochs 6 --steps 100 --eval-every 50 --eval-limit 2 "
             "--eval-samples 1 --lr 1e-4")
    records = run(tiny_folder, tmp_path / "run", *flags.split())
    assert 1 < records[-1]["step"] < 50
    assert "eval_pass@1" in records[-1]
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))[-1].name == f"step-{records[-1]['step']:06d}"


# ---- the tiny preset: theory checked on its own gradients


@pytest.fixture
def tiny_preset(tiny_folder, monkeypatch):
    """`--model tiny` with the short warm start instead of the real one."""
    monkeypatch.setattr(models, "resolve", lambda name, seed=0: str(tiny_folder))
    return "tiny"


@pytest.mark.parametrize("flags", [["--salt"], ["--salt", "--salt-scope", "group"], ["--salt-preset", "released-code"],
                                   ["--salt", "--algo", "dapo", "--gen-batch", "8"], ["--regularizer", "kl-cov"],
                                   ["--regularizer", "entropy"], ["--salt", "no-positive", "--salt-scope", "4"]])
def test_the_theory_holds_on_the_tiny_models_gradients(tiny_preset, tmp_path, flags):
    records = run(tiny_preset, tmp_path / "run", *flags)
    assert all(record["eq11_violations"] == 0 and record["eq10_error"] < 1e-5 for record in records)
    assert all(record["head_gradient_error"] < 1e-4 for record in records) and records[0]["head_gradient"] > 0


def test_a_gram_that_is_not_that_of_the_gradients_stops_the_run(tiny_preset, tmp_path, monkeypatch):
    original = train.lm_head_gram
    monkeypatch.setattr(train, "lm_head_gram", lambda *args, **options: 1.01 * original(*args, **options))
    with pytest.raises(SystemExit, match="step 1: the LM head's gradient"):
        run(tiny_preset, tmp_path / "run")


def test_advantages_that_are_not_centred_stop_the_run(tiny_preset, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "group_advantages", lambda rewards: rewards)
    with pytest.raises(SystemExit, match="step 1: the residual-only identity"):
        run(tiny_preset, tmp_path / "run")


def test_a_gram_with_nan_does_not_stop_the_tiny_model_either(tiny_preset, tmp_path, monkeypatch):
    original = train.lm_head_gram
    monkeypatch.setattr(train, "lm_head_gram", lambda *args, **options: original(*args, **options) * torch.nan)
    records = run(tiny_preset, tmp_path / "run", "--salt")
    assert [record["gram_not_finite"] for record in records] == [1, 1]


@pytest.mark.slow
def test_the_real_tiny_model_trains_with_its_own_sizes(tmp_path, monkeypatch, capsys):
    """train.py as the README's first screen has it, cut to two steps; the cache is empty."""
    monkeypatch.undo()                                                                   # the figure is wanted here
    monkeypatch.setenv("SALT_CACHE", str(tmp_path / "cache"))
    flags = "--salt --steps 2 --eval-every 2 --eval-limit 32 --eval-samples 2".split()
    assert train.main([*flags, "--output", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    assert "tiny model: its own sizes instead of Table 4's (batch_size 32" in said.out
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 0.25 <= records[0]["eval_pass@1"] + 2 * records[0]["eval_pass@1_se"]
    assert records[0]["eval_pass@1"] - 2 * records[0]["eval_pass@1_se"] <= 0.45
    assert all(record["head_gradient_error"] < 1e-3 for record in records[1:])
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000


# ---- real prompts, a real tokenizer


GSM8K = ("--dataset gsm8k --split test --steps 2 --max-response 32 --max-prompt 1024 --batch-size 2 --mini-batch 2 "
         "--group-size 4 --micro-batch 4 --salt").split()


@pytest.mark.slow
def test_gsm8k_with_the_r1_tokenizer(r1_folder, shared_data, tmp_path, updates, capfd):
    # Features of a random model are orthogonal and equally long: PR = m, and k_t = m would leave a as it is.
    records = run(r1_folder, tmp_path / "run", *GSM8K, "--data-dir", str(shared_data), "--limit", "16", "--rank-scale",
                  "0.5", pool=Reward(lambda text: len(text) % 2))
    assert len(records) == 2 and all(record["alpha"] >= 0 and record["rank"] >= 1 for record in records)
    tokenizer = AutoTokenizer.from_pretrained(r1_folder)
    for update in updates:
        rewards = torch.tensor([float(len(text) % 2) for text in update.rollouts.texts]).view(2, 4)
        advantages = train.group_advantages(rewards).flatten()
        assert advantages.any() and (update.coefficients - advantages).norm() > 0.01
        for prompt in update.rollouts.prompts:
            text = tokenizer.decode(prompt)
            assert prompt.count(tokenizer.bos_token_id) == 1 and text.endswith("<｜Assistant｜><think>\n")
    said = capfd.readouterr()
    assert said.err == ""                                           # no warning of tokenizer, template or generation
    final = AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    assert final.chat_template == tokenizer.chat_template


@pytest.mark.slow
def test_no_logits_of_a_whole_batch_exist(r1_folder, shared_data, tmp_path):
    """DAPO + SALT over the real vocabulary of 151,936, everything in one micro-batch: a process of its own, whose peak
    of memory beyond what the imports take stays below the logits (N, V) of one pass in float32."""
    flags = ["--model", str(r1_folder), *GSM8K, "--data-dir", str(shared_data), "--output", str(tmp_path / "run"),
             "--algo", "dapo", "--gen-batch", "4", "--batch-size", "4", "--mini-batch", "4", "--group-size", "8",
             "--max-response", "128", "--micro-batch", "32", "--limit", "64", "--salt", "--rank-scale", "0.5"]
    code = ("import resource, sys; sys.path[:0] = ['.', 'tests']; from training import Reward; import train; "
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
            f"train.main({flags!r}, pool=Reward(lambda text: len(text) % 2)); "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)")
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stderr) == (0, "")                   # no warning of tokenizer or template either
    records = lines(tmp_path / "run")
    fewest = min(record["length"] for record in records) * 32
    assert len(records) == 2 and all("alpha" in record for record in records)
    assert int(ended.stdout.split()[-1]) * 1024 < fewest * 151936 * 4


@pytest.mark.slow
def test_gsm8k_with_the_real_verifier(r1_folder, shared_data, tmp_path):
    """A random model earns nothing: a = 0, and the run goes on."""
    flags = ["--model", str(r1_folder), *GSM8K, "--data-dir", str(shared_data), "--output", str(tmp_path / "run")]
    assert train.main(flags) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["pass_rate"] for record in records] == [0, 0]
    assert [record["truncated"] for record in records] == [1, 1]
