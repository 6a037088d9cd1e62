"""toy/study.py, toy/regimes.py, toy/study_report.py: matched runs, resuming, keys, the map, intervals and verdicts."""
import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from training import prompts_noted

from salt.advantages import group_advantages, salt_advantages
from salt.config import parse as parse_training
from salt.data import ARITH_DIGITS
from salt.diagnose import ON_THE_MAP
from salt.errors import UserError
from salt.geometry import update_deviation
from toy import redundancy, regimes, study, study_figures, study_measures, study_report, study_verdicts
from toy.arithmetic import HARD
from toy.study import CELLS, CORE, EXPERIMENTS, SEEDS, SIZES, Job, Results, code_hash

ROOT = Path(__file__).resolve().parents[1]
CODE = {"train": "t", "redundancy": "r", "regimes": "m"}


def job(cell: str = "grpo", seed: int = 2025, size: str = "smoke", code: str = "t") -> Job:
    return Job.make("train", cell, seed, size, code)


def result(cell: str, seed: int, avg: float, **curves) -> dict:
    """A finished run with two evaluations and five steps."""
    curves = {"eval_avg": [0.1, None, None, None, None, avg], "eval_pass@8": [0.2, *[None] * 4, avg],
              "n_eff_total": [None, 1, 1, 1, 1, 1]} | curves
    return {"key": f"{cell}{seed}", "kind": "train", "cell": cell, "seed": seed, "size": "standard", "code": "t",
            "flags": {}, "commit": "c", "machine": "m", "seconds": 1.0, "steps": [0, 1, 2, 3, 4, 5], "curves": curves}


# ---------------------------------------------------------------------------- what is run

def test_core_is_24_methods_and_every_named_method_exists():
    assert len(CORE) == 24 and len(SEEDS) == 5
    assert {name for e in EXPERIMENTS.values() for name in e.methods(full=True)} <= set(CELLS)


@pytest.mark.parametrize("size", SIZES)
def test_train_accepts_the_flags_of_every_method(size, tmp_path):
    for cell in CELLS:
        flags = study.arguments(job(cell, size=size), "tiny", tmp_path)
        config, _, _ = parse_training(flags)
        own = job(cell, size=size).flags
        assert {name: getattr(config, name) for name in own} == own


def test_group_sizes_keep_the_number_of_responses():
    for size in SIZES:
        for cell in CELLS:
            flags = job(cell, size=size).flags
            whole = SIZES[size]["batch_size"] * SIZES[size].get("group_size", 8)
            assert flags["batch_size"] * flags["group_size"] == whole, (size, cell)
            assert flags["batch_size"] % flags["mini_batch"] == 0


def test_key_knows_what_decides_the_numbers():
    keys = {job().key, job("grpo+salt").key, job(seed=2026).key, job(size="quick").key, job(code="u").key}
    assert len(keys) == 5
    same = job()
    same.flags.update(workers=7, micro_batch=1)                        # time and memory only
    assert same.key == job().key
    same.flags["lr"] = 1.0
    assert same.key != job().key


def test_code_hash_sees_code_and_neither_comments_nor_docstrings(tmp_path):
    for name in study.DECIDES["train"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert code_hash("train", tmp_path) == code_hash("train")
    loss = tmp_path / "salt" / "loss.py"
    text = loss.read_text()
    loss.write_text(text.replace('"""', '"""Other words. ', 1) + "\n\n# a remark\n")
    assert code_hash("train", tmp_path) == code_hash("train")
    loss.write_text(text.replace("clip_low: float = 0.2", "clip_low: float = 0.3"))
    assert code_hash("train", tmp_path) != code_hash("train")


# ---------------------------------------------------------------------------- matched

@pytest.fixture
def short_warm_start(monkeypatch, tiny_folder):
    monkeypatch.setattr(study, "warm_start", lambda config: tiny_folder)


@pytest.mark.slow
def test_matched_means_matched(short_warm_start, tmp_path):
    """Same warm start, same prompts at every step, same responses as long as the policies are the same."""
    taken, first = {}, {}
    for cell, seed in [("grpo", 2025), ("grpo+salt", 2025), ("grpo+interpolated@group", 2025), ("grpo+kl-cov", 2025),
                       ("grpo+permuted", 2025), ("grpo", 2026)]:
        folder = tmp_path / f"{cell}{seed}"
        with prompts_noted(folder):
            found = study.train_cell(job(cell, seed), folder)
        taken[cell, seed] = [json.loads(line) for line in (folder / "taken.jsonl").read_text().splitlines()]
        first[cell, seed] = [found["curves"][name][1] for name in ("length", "entropy", "pass_rate")] + [
            found["curves"]["eval_avg"][0]]
    assert len(taken["grpo", 2025]) == SIZES["smoke"]["steps"]
    for cell in ("grpo+salt", "grpo+interpolated@group", "grpo+kl-cov", "grpo+permuted"):
        assert taken[cell, 2025] == taken["grpo", 2025] and first[cell, 2025] == first["grpo", 2025], cell
    assert taken["grpo", 2026] != taken["grpo", 2025] and first["grpo", 2026] != first["grpo", 2025]


@pytest.mark.parametrize("kind", ["train", "redundancy"])
def test_work_gives_a_row_and_clears_up(kind, short_warm_start, tmp_path):
    given = Job.make(kind, "grpo+salt" if kind == "train" else "redundancy", 2025, "smoke", "t")
    row = study.work(given, tmp_path / "work" / given.key)
    assert row["key"] == given.key and row["seconds"] > 0 and not list((tmp_path / "work").iterdir())
    json.dumps(row)
    if kind == "train":
        assert row["steps"] == [0, 1, 2] and len(row["curves"]["pr_total"]) == 3
        assert row["curves"]["eval_pass@8"][0] is not None and row["curves"]["seconds_total"][1] > 0
    else:
        assert [line["G"] for line in row["table"]] == [2, 4, 8, 16]
        for line in row["table"]:                                      # an untrained model: most have no signal
            assert (line["signal"] > 0) == ("group kept" in line) and 0 <= line.get("group kept", 0) <= 1.0001


def test_channels_by_hand():
    # K = diag(4, 4, 0.01, 0.01): PR = 8.02² / 32.0002 = 2.01, k = 2, P keeps the first two: a_main = (1, −1, 0, 0).
    # n_eff = 1 for a diagonal K, so α = 0: a' = a_main, half of ‖a‖² = 4 is kept, D_a = sqrt(2 / 4).
    gram = torch.diag(torch.tensor([4.0, 4.0, 0.01, 0.01], dtype=torch.float64))
    a = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    found = redundancy.channels(gram, a, [torch.arange(4)])
    assert found == pytest.approx({"alpha": 0, "rank_share": 0.5, "kept": 0.5, "exploration": 0, "d_a": 0.5 ** 0.5})
    # In two blocks each has k = 2 of 2: P keeps all, a' = a.
    apart = redundancy.channels(gram, a, [torch.tensor([0, 1]), torch.tensor([2, 3])])
    assert apart["kept"] == pytest.approx(1) and apart["d_a"] == pytest.approx(0)


def test_interventions_swap_coefficients_on_the_same_rollouts():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(128, 40, generator=generator, dtype=torch.float64)
    a = group_advantages((torch.rand(16, 8, generator=generator) < 0.5).double()).flatten()
    gram = features @ features.T
    found = redundancy.interventions(gram, a, 8, seed=0)
    by_hand = []
    for rows in (slice(0, 64), slice(64, 128)):
        new = salt_advantages(gram[rows, rows], a[rows])
        by_hand.append(update_deviation(gram[rows, rows], a[rows], new.coefficients, new.basis))
    for name in ("d_a", "d_g", "n_eff", "u_perp_gain"):
        assert found["salt"][name] == pytest.approx(sum(row[name] for row in by_hand) / 2)
    assert found["base"]["d_a"] == 0 and found["permuted"]["d_a"] > found["salt"]["d_a"]
    assert set(found) == {"base"} | {f"{name}{scope}" for name in redundancy.MATCHED for scope in ("", "@group")}


def test_the_prediction_leaves_out_groups_without_a_signal():
    # Two orthogonal responses: κ = 0; two equal ones: κ = 1. Only the first group has a signal.
    gram = torch.block_diag(torch.eye(2), torch.ones(2, 2)).double()
    assert redundancy.without_cancellation(gram, torch.tensor([1.0, -1.0, 0.0, 0.0]), 2) == pytest.approx(1)
    assert redundancy.without_cancellation(gram, torch.tensor([0.0, 0.0, 1.0, -1.0]), 2) == pytest.approx(0)
    assert redundancy.without_cancellation(gram, torch.tensor([1.0, -1.0, 1.0, -1.0]), 2) == pytest.approx(0.5)


def test_a_run_that_fails_is_told_and_its_log_stays(short_warm_start, tmp_path):
    given = job()
    given.flags["group_size"] = 0
    row = study.work(given, tmp_path / "work" / given.key)
    assert "--group-size 0" in row["failed"] and (tmp_path / "work" / f"{given.key}.log").exists()


# ---------------------------------------------------------------------------- on disk

def test_results_survive_an_interruption(tmp_path):
    results = Results(tmp_path, write=True)
    results.add(result("grpo", 2025, 0.5))
    with results.path.open("a") as file:
        file.write('{"key": "half a li')                                # killed while it wrote
    results._lock.close()
    again = Results(tmp_path, write=True)
    assert [row["cell"] for row in again.rows] == ["grpo"]
    again.add(result("grpo", 2026, 0.5))
    assert [row["seed"] for row in Results(tmp_path).rows] == [2025, 2026]


def test_two_studies_do_not_write_into_one_folder(tmp_path):
    results = Results(tmp_path, write=True)
    with pytest.raises(UserError, match="another study is writing"):
        Results(tmp_path, write=True)
    assert results.rows == Results(tmp_path).rows == []                   # reading is always possible


def test_a_spoiled_line_is_named(tmp_path):
    (tmp_path / "runs.jsonl").write_text('{"key": 1}\n')
    with pytest.raises(UserError, match="runs.jsonl, line 1"):
        Results(tmp_path)


def test_only_what_is_not_on_disk_is_run(tmp_path):
    results, said = Results(tmp_path, write=True), []
    done = job()
    results.add(result("grpo", 2025, 0.5) | {"key": done.key})
    assert study.run_all([done], results, 1, said.append) == []
    assert said == ["1 runs: 1 on disk, 0 to do, 1 at a time"] and job(code="other") not in results


def test_results_of_other_code_are_not_mixed_in(tmp_path):
    rows = [result("grpo", 2025, 0.5), result("grpo", 2026, 0.5) | {"code": "old"}, result("grpo", 2027, 0.5) | {
        "code": "old"}]
    assert [row["seed"] for row in study_measures.of_one_version(rows, CODE, False)] == [2025]
    assert [row["seed"] for row in study_measures.of_one_version(rows, CODE, True)] == [2026, 2027]
    with pytest.raises(UserError, match="2 runs of other code"):
        study_measures.gather(tmp_path, rows[1:], CODE)


@pytest.mark.parametrize("flags, words", [
    (["mane"], "unknown experiment 'mane': core, all, report, main"),
    (["main", "--methods", "grpo,sallt"], "unknown method 'sallt': one of grpo, grpo.salt"),
    (["main", "--methods", "grpo+only-main"], "main has no method 'grpo.only-main' without --full: grpo, grpo.salt"),
    (["main", "--seeds", "1,x"], "--seeds 1,x"), (["main", "--processes", "0"], "--processes 0"),
    (["main", "--quick", "--smoke"], "not allowed"), (["report", "--output", "nowhere"], "nowhere holds no results")])
def test_mistakes_are_one_line(flags, words, tmp_path):
    with pytest.raises(UserError, match=words):
        study.main([*flags] if "--output" in flags else [*flags, "--output", str(tmp_path / "out")])


def test_program_says_a_mistake_in_one_line():
    done = subprocess.run([sys.executable, "toy/study.py", "main", "--methods", "sallt"], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: unknown method 'sallt'")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_study_that_is_killed_leaves_nothing_behind_and_goes_on(tmp_path):
    command = [sys.executable, "toy/study.py", "redundancy", "--smoke", "--seeds", "2025", "--processes", "1",
               "--output", str(tmp_path)]
    settings = {"cwd": ROOT, "text": True, "env": os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}}
    first = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, **settings)
    said = ""
    while "[1/3]" not in said:                                                     # one run is on disk
        line = first.stdout.readline()
        assert line, said
        said += line
    first.kill()
    first.wait()
    assert "min left" in said
    deadline = time.monotonic() + 30
    with pytest.raises(ProcessLookupError):                                        # its workers end by themselves
        while time.monotonic() < deadline:
            os.killpg(first.pid, 0)
            time.sleep(0.1)
    kept = (tmp_path / "runs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "runs.jsonl").write_text(kept[0] + '{"key": "half a li')           # it might have been writing
    second = subprocess.run(command, capture_output=True, **settings)
    assert second.returncode == 0 and "3 runs: 1 on disk, 2 to do" in second.stdout, second.stdout + second.stderr
    again = (tmp_path / "runs.jsonl").read_text().splitlines(keepends=True)
    assert again[0] == kept[0] and {json.loads(line)["cell"] for line in again} == {"grpo", "dapo", "redundancy"}
    text = (tmp_path / "study.md").read_text()
    assert "not run" in text and "`python toy/study.py main`" in text


# ---------------------------------------------------------------------------- the map

@pytest.mark.parametrize("variant", ["salt", "interpolated"])
def test_batched_salt_is_salt(variant):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 16, 5, generator=generator, dtype=torch.float64)
    scores[3:] += 2 * torch.randn(3, 1, 5, generator=generator, dtype=torch.float64)           # the last three cancel
    right = scores[1] @ torch.randn(5, generator=generator, dtype=torch.float64) > 0
    grams = scores @ scores.mT / 16
    a = group_advantages((torch.rand(24, 4, generator=generator, dtype=torch.float64) < 0.5).double()).view(6, 16)
    a[0] = 0                                                                                    # no signal at all
    a[1] = group_advantages(right.double().view(4, 4)).flatten()                                # nothing cancels
    found, facts = regimes.salt_batched(grams, a, variant == "interpolated")
    for i in range(6):
        one = salt_advantages(grams[i], a[i], variant)
        torch.testing.assert_close(found[i], one.coefficients, rtol=1e-9, atol=1e-12)
        assert facts["alpha"][i].item() == pytest.approx(one.alpha) and facts["rank_share"][i] == one.rank / 16
        assert facts["kept"][i].item() == pytest.approx((one.main.square().sum() / a[i].square().sum().clamp_min(
            1e-300)).item() if variant == "salt" else facts["kept"][i].item())
    assert facts["alpha"][1] == 0 and (facts["alpha"][3:] > 0.5).all()                          # both sides were there


def test_turning_features_into_their_span_changes_no_inner_product():
    bandits = regimes.Cell(700, 0.5, 1.0, seeds=2).bandits()                     # 8 · 65 = 520 features in R^700
    before = torch.stack([bandit.features for bandit in bandits]).flatten(1, 2)
    after = regimes.stack(bandits).features.flatten(1, 2)
    assert after.shape == (2, 520, 520)
    torch.testing.assert_close(after @ after.mT, before @ before.mT, rtol=1e-9, atol=1e-9)


def test_the_dials_of_the_map_turn_what_they_name():
    def facts(dimension: int, cosine: float) -> dict:
        bandits = regimes.stack(regimes.Cell(dimension, cosine, 1.0, seeds=3).bandits())
        _, found = regimes.train("salt", bandits, 1.0, torch.tensor([1.0], dtype=torch.float64), 3)
        return {name: values.item() for name, values in found.items()}

    narrow, wide, shared = facts(4, 0.0), facts(256, 0.0), facts(256, 0.9)
    assert narrow["rank_share"] < 0.1 and wide["rank_share"] > 0.4 and narrow["kept"] < wide["kept"]
    assert shared["n_eff"] < 0.3 and wide["n_eff"] > 0.9 and shared["alpha"] > 0.6 > wide["alpha"]


def test_learning_learns_and_noise_does_not():
    bandits = regimes.stack(regimes.Cell(64, 0.0, 1.0, seeds=3).bandits())
    rates = torch.tensor([3.0], dtype=torch.float64)
    before = regimes.expected_reward(bandits, torch.zeros(3, 1, 64, dtype=torch.float64)).mean()
    learned = {signal: regimes.train("grpo", bandits, signal, rates, 40)[0].mean() for signal in (1.0, 0.0)}
    assert learned[1.0] > before + 0.2 and abs(learned[0.0] - before) < 0.1


def test_a_map_that_is_stopped_goes_on_and_other_code_is_left_alone(tmp_path):
    path, said = tmp_path / "regimes.csv", []
    cells = regimes.run("smoke", path, "one", said.append)
    assert len(said) == 4 and len(cells) == 4 * len(regimes.METHODS)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-5]) + lines[-5][:20] + "\n")                     # the last cell was cut off
    assert len(regimes.read(path, "one")) == 3 * len(regimes.METHODS)
    again = regimes.run("smoke", path, "one", said.append)
    assert len(said) == 5 and again == cells
    assert regimes.read(path, "two") == [] and len(regimes.run("smoke", path, "two", said.append)) == len(cells)
    assert len(said) == 9 and regimes.read(path, "one") == cells


# ---------------------------------------------------------------------------- the report

def test_differences_are_paired_by_seed_with_both_intervals():
    rows = [result("grpo", 1, 0.50), result("grpo", 2, 0.60), result("grpo", 3, 0.9),
            result("grpo+salt", 1, 0.52), result("grpo+salt", 2, 0.66)]
    change = study_measures.Runs(rows).compare("grpo+salt", "grpo", "avg@8 %")
    # Differences 2 and 6 points: mean 4, standard error 2, t with one degree of freedom 12.706: 4 ± 25.4.
    assert change.seeds == 2 and change.mean == pytest.approx(4)
    assert (change.low, change.high) == (pytest.approx(4 - 25.412, abs=1e-2), pytest.approx(4 + 25.412, abs=1e-2))
    assert change.bootstrap == (pytest.approx(2), pytest.approx(6))
    assert change.text(".1f", signed=True) == "+4.0 [-21.4, +29.4]"
    alone = study_measures.Runs(rows[:1]).measure("grpo", "avg@8 %")
    assert alone.text(".1f") == "50.0" and alone.low != alone.low                    # one seed has no interval


@pytest.mark.parametrize("values, positive, told", [
    ([1, 1.1, 0.9], True, "holds"), ([1, 1.1, 0.9], False, "does not hold"), ([-1, -1.1, -0.9], True, "does not hold"),
    ([-1, 1, 0.5], True, "cannot be tested at this size"), ([3], True, "cannot be tested at this size"),
    ([0, 0, 0], True, "does not hold"), ([0], True, "cannot be tested at this size"), ([], True, "not run")])
def test_verdicts(values, positive, told):
    assert study_verdicts.judge(study_measures.interval(values), positive) == told


def test_the_change_per_doubling_of_the_group_size():
    """Of the sizes that every seed has; a line through three points, not their ends."""
    rows = [result(cell, seed, avg + seed / 100)
            for cell, avg in (("grpo", 0.1), ("grpo G=16", 0.1), ("grpo G=32", 0.5), ("grpo+salt", 0.2),
                              ("grpo+salt G=16", 0.4), ("grpo+salt G=32", 0.9)) for seed in (1, 2)]
    rows.append(result("grpo+salt G=4", 1, 0.7))
    runs = study_measures.Runs(rows)
    sizes, slope = runs.per_doubling("grpo+salt", "avg@8 %")
    assert sizes == "8, 16, 32" and slope.values == pytest.approx([35, 35])
    assert runs.per_doubling("grpo+salt", "avg@8 %", base="grpo")[1].values == pytest.approx([15, 15])
    assert runs.per_doubling("dapo", "avg@8 %")[1].seeds == 0


def test_the_base_of_a_method():
    expected = {("main", "grpo+salt@group"): "grpo", ("main", "dapo+interpolated"): "dapo",
                ("main", "grpo+salt T=1"): "grpo T=1", ("main", "grpo+salt@group sum"): "grpo",
                ("bias", "grpo+salt signal"): "grpo", ("bias", "grpo+released-code"): "grpo token-mean",
                ("rollouts", "hard grpo+salt G=32"): "hard grpo G=32", ("ablation", "grpo+no-proj"): "grpo+salt",
                ("ablation", "grpo+no-proj@group"): "grpo+salt@group", ("matched", "dapo+permuted"): "dapo+salt"}
    assert {key: study_measures.base_of(*key) for key in expected} == expected


def test_late_metrics_are_of_the_last_fifth():
    row = result("grpo+salt", 1, 0.5, d_a=[None, 1.0, 1.0, 1.0, 1.0, 3.0], n_eff=[None, 0, 0, 0, 0, 7])
    assert study_measures.late("d_a")(row) == 3 and study_measures.whole("d_a")(row) == pytest.approx(7 / 5)
    assert study_measures.METRICS["n_eff"][0](row) == 7                        # of a', not n_eff_total
    assert study_measures.METRICS["n_eff"][0](result("grpo", 1, 0.5)) == 1


def warm_start_result(seed: int) -> dict:
    """Redundancy as toy/redundancy.py finds it; at G = 256 no group has a signal."""
    table = [{"G": size, "r_in": 0.5, "pr_in": 2.0, "n_eff_in_signal": 1.0, "mini-batch alpha": alpha}
             for size, alpha in ((8, 0.1), (128, 0.3))] + [{"G": 256, "r_in": 0.5, "pr_in": 2.0}]
    swapped = {name: {"d_a": 0.0, "d_g": 0.0, "n_eff": n_eff, "u_perp_gain": 1.0}
               for name, n_eff in (("base", 1.0), ("salt", 1.5), ("permuted", 1.0), ("matched-rand-subspace", 1.2))}
    return {"key": f"r{seed}", "kind": "redundancy", "cell": "redundancy", "seed": seed, "size": "standard",
            "code": "r", "flags": {}, "commit": "c", "machine": "m", "seconds": 1.0, "table": table, "matched": swapped}


def test_report_on_a_few_runs(tmp_path):
    rows = [result(cell, seed, avg + seed / 1000, clip_fraction=[None, *[1e-3] * 5], d_a=[None, *[0.8] * 5])
            for cell, avg in (("grpo", 0.3), ("grpo+salt", 0.6), ("grpo G=32", 0.3), ("grpo+salt G=32", 0.5))
            for seed in (1, 2, 3)] + [warm_start_result(seed) for seed in (1, 2)]
    found = study_measures.gather(tmp_path, rows, CODE)
    study_figures.draw(found, tmp_path)
    text = study_report.write(found, tmp_path).read_text()
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("|")}
    assert "30.2 [30.0, 30.4] (51.2)" in text and lines["dapo+salt"].count("–") > 3 and "not run" in lines["dapo+salt"]
    assert "| SALT raises avg@8 % | avg@8 %: grpo+salt − grpo = +30.0 [+30.0, +30.0]; the paper: +2.5 | holds |" in text
    assert "| avg@8 %, gain per doubling of G (8, 32): -5.0 [-5.0, -5.0] | does not hold |" in text
    assert "| α_t grows with G, in training | alpha_t, grpo+salt, per doubling of G (8, 32): – | not run |" in text
    assert lines["(ours) SALT raises pass@8 % on the harder task"].endswith("not run |")
    assert "| mini-batch alpha, warm start, G = 128 − G = 8: +0.20 [+0.20, +0.20] | holds |" in text
    assert "| warm start, n_eff: permuted − SALT = -0.50 [-0.50, -0.50] | holds |" in text
    assert lines["a"].startswith("| a | 0.00 [0.00, 0.00] |") and lines["128"].startswith("| 128 |")
    assert lines["clip fraction below 2e-4"].endswith("does not hold |")
    assert "`python toy/study.py ablation`" in text
    for name in ("study.csv", "dynamics.png", "redundancy.png", "ablation.png", "rollouts.png"):
        assert (tmp_path / name).stat().st_size > 0
    assert "main,grpo+salt,avg@8 %,3,60.2," in (tmp_path / "study.csv").read_text()


def test_the_tiny_models_points_stand_beside_the_map(tmp_path):
    kept = {"grpo+salt": 0.1, "grpo+salt@group": 0.7, "grpo+interpolated": 0.5}
    rows = [result(cell, seed, 0.5, kept=[None, *[kept.get(cell, 0.9)] * 5])
            for cell in ("grpo", *kept, "grpo+rand-proj", "grpo+kl-cov+salt") for seed in (1, 2)]
    table = study_report.points_table(study_measures.Runs(rows))
    assert {line[0]: line[-1] for line in table[1:]} == {
        "grpo+salt": "slower", "grpo+salt@group": "much the same", "grpo+interpolated": "–"}
    assert all(line[-3:-1] == ["+0.0 [+0.0, +0.0]", "grpo"] for line in table[1:])
    regimes.run("smoke", tmp_path / "regimes.csv", CODE["regimes"], lambda line: None)
    study_figures.draw(study_measures.gather(tmp_path, rows, CODE), tmp_path)
    assert (tmp_path / "regimes_points.png").stat().st_size > 0


def test_diagnose_quotes_the_map():
    """The words of `train.py --diagnose` hold the numbers of the committed map."""
    rows = regimes.read(ROOT / "toy" / "results" / "study" / "regimes.csv", None)
    assert len(rows) == len(regimes.grid("full")) * len(regimes.METHODS)
    most, half, little = study_report.kept_table(rows)[1:]
    assert f"({most[1]} such cells, at most {most[3]} lost)" in ON_THE_MAP["most"] and most[4] == "0"
    assert f"({half[1]} such cells; SALT lost in {half[2]}, at most {half[3]}, and in one with" in ON_THE_MAP["half"]
    assert half[4] == "1"
    told = f"({little[1]} such cells; it lost in {little[2]}, up to {little[3][:4]}, and in {little[4]} with"
    assert told in ON_THE_MAP["little"] and little[6] == "0 / 2"


def test_each_row_says_how_to_get_it_again():
    """The command beside a row asks for the runs of that row and of what it is compared with, and nothing else."""
    rows = [result("grpo", 1, 0.5)]
    for name in study_measures.COLUMNS:
        for line in study_report.experiment_table(name, study_measures.Runs(rows))[1:]:
            _, script, *flags = shlex.split(line[-1].strip("`"))
            asked = {item.cell for item in study.jobs_of(study.parse(flags), CODE)}
            assert script == "toy/study.py" and asked == {line[0], study_measures.base_of(name, line[0])}


def test_paper_values_are_the_papers():
    assert study_measures.PAPER["main"]["grpo+salt"] == {"avg@8 %": 53.7, "pass@8 %": 78.1}
    assert study_measures.PAPER["bias"]["dapo+salt"] == {"D_a": 0.17, "D_g": 0.11, "n_eff": 1.0, "U_perp gain": 1.24,
                                                         "avg@8 %": 68.2}
    for experiment, cells in study_measures.PAPER.items():
        assert set(cells) <= set(EXPERIMENTS[experiment].methods(full=True))


def test_options_choose_jobs():
    options = argparse.Namespace(what="core", full=False, methods=None, seeds=[1, 2], size="smoke")
    jobs = study.jobs_of(options, CODE)
    assert len(jobs) == 2 * 25 and len({item.key for item in jobs}) == 50          # 24 methods and the redundancy
    options.methods, options.what = ["grpo"], "main"
    assert [(item.cell, item.seed) for item in study.jobs_of(options, CODE)] == [("grpo", 1), ("grpo", 2)]


def test_the_hard_task_is_one_task():
    """The data set and the warm start must mean the same sums."""
    assert ARITH_DIGITS["arith-hard"] == HARD.digits
