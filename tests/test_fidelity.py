"""toy/fidelity.py: the Grams against plain backward passes, the metrics by hand, nulls that behave, the program."""
import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from salt.advantages import group_advantages
from salt.rollout import Rollouts
from toy import fidelity
from toy.arithmetic import WarmStart, make_model, make_tokenizer
from toy.fidelity import (COLUMNS, FULL, LAST, PAPER, PERMUTED, PLAIN, RANDOM, REST, Task, cosines, gradient_grams,
                          measure, noise_gram, partition, passes, principal_cosines, proxy_gram, references,
                          sign_agreement, spearman, summarise, table_lines)

ROOT = Path(__file__).resolve().parents[1]
ROLLOUTS = Rollouts([[4, 5, 6], [7, 8], [9, 4, 3]], [[5, 6, 7, 1], [3, 1], [8]], [True, True, False], ["", "", ""])


def small_model(layers: int = 1):
    torch.manual_seed(0)
    return make_model(WarmStart(hidden=16, layers=layers), 22).double().eval()


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=22, n_positions=64, n_embd=16, n_layer=5, n_head=2, eos_token_id=1,
                                      bos_token_id=1)).double().eval()


def plain_gradients(model, temperature: float) -> torch.Tensor:
    """(m, P), response by response, from the full logits and `backward`."""
    rows = []
    for prompt, response in zip(ROLLOUTS.prompts, ROLLOUTS.responses):
        model.zero_grad()
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1] / temperature
        (logits.log_softmax(-1)[range(len(response)), response].sum() / len(response)).backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return torch.stack(rows)


def program(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(ROOT / "toy" / "fidelity.py"), *arguments], capture_output=True,
                          text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})


# ---------------------------------------------------------------------------- gradients

@pytest.mark.parametrize("make", [small_model, gpt2])
@pytest.mark.parametrize("budget", [2 ** 30, 3 * 8 * 500])             # everything at once; 500 columns at a time
def test_grams_are_those_of_plain_backward_passes(make, budget):
    model = make()
    features = plain_gradients(model, 0.6)
    grams = gradient_grams(model, ROLLOUTS, 0.6, partition(model)[0], budget)
    torch.testing.assert_close(sum(grams.values()), features @ features.T / 3, rtol=1e-11, atol=0)


def test_head_part_is_the_proxy_and_the_last_block_is_disjoint_from_it():
    model = small_model(layers=2)
    parts, blocks = partition(model)
    grams = gradient_grams(model, ROLLOUTS, 0.6, parts)
    torch.testing.assert_close(grams["head"], proxy_gram(model, ROLLOUTS, 0.6), rtol=1e-11, atol=0)
    last = {id(p) for unit in blocks[LAST] for p in parts[unit]}
    assert last == {id(p) for p in model.model.layers[-1].parameters()}
    assert id(model.lm_head.weight) not in last


@pytest.mark.parametrize("make, units", [(small_model, 2), (gpt2, 5)])
def test_parts_hold_every_parameter_once(make, units):
    model = make()
    parts, blocks = partition(model)
    held = [id(p) for own in parts.values() for p in own]
    assert len(held) == len(set(held)) and set(held) == {id(p) for p in model.parameters()}
    assert len(parts) == units + 2 and all(parts.values())
    assert {unit for block in blocks.values() for unit in block} <= set(parts)


def test_passes_cover_each_number_once_within_the_width():
    one, two = torch.nn.Parameter(torch.zeros(3, 3)), torch.nn.Parameter(torch.zeros(2))
    assert [[(n, a, b) for n, _, a, b in chunk] for chunk in passes({"x": [one], "y": [two]}, 4)] == [
        [("x", 0, 4)], [("x", 4, 8)], [("x", 8, 9), ("y", 0, 2)]]


def test_references_add_the_parts():
    grams = {name: torch.eye(2) * 10 ** i for i, name in enumerate(["head", "rest", "0.0", "1.0", "2.0"])}
    blocks = {"Early block": ["0.0"], "Middle block": ["1.0"], "Late block": ["1.0"], LAST: ["2.0"], "pool": ["2.0"]}
    found = {name: [gram[0, 0].item() for gram in several]
             for name, several in references(grams, blocks, torch.Generator()).items()}
    # head 1, rest 10, layers 100, 1000, 10000; the aggregate is early, middle and late (one layer here), and random.
    assert found == {FULL: [11111], REST: [11110], "Blockwise aggregate": [11100], "Early block": [100],
                     "Middle block": [1000], "Late block": [1000], LAST: [10000], RANDOM: [10000]}


# ---------------------------------------------------------------------------- metrics

def test_cosines_by_hand():
    # vectors (3, 4), (1, 0), (0, 0): cosines 3 / 5, 0, 0 for the pairs (0, 1), (0, 2), (1, 2).
    vectors = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(cosines(vectors @ vectors.T), torch.tensor([0.6, 0.0, 0.0], dtype=torch.float64))


def test_spearman_by_hand():
    # ranks of x: 1, 2.5, 2.5, 4; of y: 2, 1, 3, 4. Centred: (-1.5, 0, 0, 1.5), (-.5, -1.5, .5, 1.5):
    # 3 / sqrt(4.5 * 5) = 0.632456.
    x, y = torch.tensor([0.0, 5.0, 5.0, 6.0]), torch.tensor([2.0, 1.0, 7.0, 100.0])
    assert spearman(x, y) == pytest.approx(3 / 22.5 ** 0.5, rel=1e-6)
    assert spearman(x.exp(), y) == pytest.approx(spearman(x, y)) and spearman(x, -x) == pytest.approx(-1)


def test_sign_agreement_looks_at_the_strong_pairs_of_the_reference():
    reference = torch.tensor([0.9, -0.8, 0.1, -0.1, 0.05, 0.02, 0.03, -0.04, 0.06, 0.07])
    proxy = torch.tensor([0.01, 0.9, -1.0, 1.0, -1, -1, -1, 1, -1, -1])
    assert sign_agreement(proxy, reference) == 0.5            # of the fifth 0.9 and -0.8: the first only
    assert sign_agreement(proxy, reference, 0.1) == 1 and sign_agreement(proxy, reference, 1.0) == 0.1


def test_principal_cosines_by_hand():
    # Leading axes e1, e2 against e1 and (e2 + e3)/√2: cosines 1 and 1/√2.
    turned = torch.tensor([[1.0, 0, 0], [0, 1, 1], [0, 1, -1]], dtype=torch.float64)
    turned /= turned.norm(dim=0)
    weights = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(principal_cosines(weights, turned @ weights @ turned.T, 2),
                               torch.tensor([1.0, 0.5 ** 0.5], dtype=torch.float64))


def correlated_grams(m: int = 96, noise: float = 0.0):
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(m, 10, generator=generator, dtype=torch.float64) * torch.arange(1, 11)
    blurred = features + noise * features.norm() / features.numel() ** 0.5 * torch.randn(
        m, 10, generator=generator, dtype=torch.float64)
    rewards = (features[:, -1].view(-1, 8) > 0).double()
    return features @ features.T, blurred @ blurred.T, group_advantages(rewards).flatten()


def test_a_perfect_proxy_is_perfect_at_any_scale():
    gram, _, a = correlated_grams()
    found = fidelity.fidelity(5 * gram, gram, a)
    assert {column: pytest.approx(value, abs=1e-9) for column, value in found.items()} == \
        dict.fromkeys(COLUMNS, 1.0) | {"pr": 0.0}


def test_nulls_and_noise_sit_below_the_proxy():
    gram, blurred, a = correlated_grams(noise=0.3)
    generator = torch.Generator().manual_seed(2)
    order = torch.randperm(len(gram), generator=generator)
    proxy, permuted, noise = (fidelity.fidelity(k, gram, a) for k in (
        blurred, blurred[order][:, order], noise_gram(len(gram), 4000, generator)))
    for null in (permuted, noise):
        assert abs(null["gram"]) < 0.1 and abs(null["sign"] - 0.5) < 0.1
        for column in ("gram", "sign", "subspace", "cosine", "order"):
            assert proxy[column] > null[column] + 0.1
    # The cells that cannot be (row 19 of the notes): a permutation changes neither PR nor k_t ...
    assert permuted["pr"] == pytest.approx(proxy["pr"], rel=1e-9) and permuted["rank"] == proxy["rank"]
    # ... and noise leaves a' near a, so that its a' cosine is a's own.
    own = fidelity.agreement(a, fidelity.salt_advantages(gram, a).coefficients)
    assert noise["cosine"] == pytest.approx(own["cosine"], abs=0.1)


def test_chance_level_of_the_subspace_column_is_the_papers():
    # Mean singular value of two random 8-dimensional subspaces of R^256: 8 / (3π) · sqrt(8 / 256) = 0.150.
    generator = torch.Generator().manual_seed(0)
    values = [principal_cosines(noise_gram(256, 1000, generator), noise_gram(256, 1000, generator), 8).mean().item()
              for _ in range(10)]
    assert sum(values) / 10 == pytest.approx(0.150, abs=0.01)


# ---------------------------------------------------------------------------- table

def test_summary_and_cells():
    rows = [{name: dict.fromkeys(COLUMNS, value) for name in [*PAPER, REST]}
            | {PLAIN: {"cosine": value, "order": value}} for value in (0.2, 0.6)]
    table = summarise([(row, {}, {}) for row in rows])
    assert table[FULL]["gram"] == pytest.approx((0.4, 0.2))
    text = {first: cells for first, *cells in table_lines(table, ["gram", "cosine", "order"])}
    assert text[FULL] == ["0.40 ± 0.20 [0.71]", "0.40 ± 0.20 [0.86]", "0.40 ± 0.20"]
    assert text[PLAIN] == ["-", "0.40 ± 0.20", "0.40 ± 0.20"]


def test_paper_values_are_table_5():
    assert list(PAPER[FULL]) == list(COLUMNS)[:6] and len(PAPER) == 9
    assert PAPER[LAST]["gram"] == (0.79, 0.04) and PAPER[PERMUTED]["cosine"] == (0.08, 0.05)
    assert PAPER["Early block"]["pr"] == (0.16, 0.06) and PAPER[FULL]["rank"] == (0.74, 0.07)


# ---------------------------------------------------------------------------- program

def test_a_model_without_right_answers_gets_the_coin_and_says_so(tmp_path):
    gpt2().float().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    task = Task(str(tmp_path), 3, 4, 0)
    rollouts, rewards, advantages = task.batch()
    assert task.coin and advantages.any() and set(rewards.flatten().tolist()) == {0.0, 1.0}
    rows, grams, facts = measure(task.model, rollouts, advantages, 0.6, torch.Generator().manual_seed(0))
    assert 0 < facts["share"] < 1 and grams["proxy"].shape == (12, 12)
    assert all(value == value for name, row in rows.items() for value in row.values())


@pytest.mark.parametrize("flags, words", [
    (["--groups", "1"], "--groups 1"), (["--group-size", "1"], "--group-size 1"), (["--seed", "-1"], "--seed -1"),
    (["--mini-batches", "0"], "--mini-batches 0"), (["--model", "nowhere"], "unknown model"),
    (["--grups", "4"], "grups")])
def test_mistakes_are_one_line(flags, words, tmp_path, capsys):
    with pytest.raises(fidelity.UserError, match=words):
        fidelity.main([*flags, "--output", str(tmp_path)])


def test_unwritable_output_is_one_line_and_status_2(tmp_path):
    (tmp_path / "file").write_text("")
    done = program("--output", str(tmp_path / "file"))
    assert done.returncode == 2 and done.stderr.startswith("error: cannot write") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_program_on_a_run_of_train(tiny_folder, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")                # the run's own, not a model's
    (tmp_path / "run" / "final").symlink_to(tiny_folder)
    done = program("--quick", "--model", str(tmp_path / "run"), "--groups", "4", "--group-size", "4",
                   "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "cannot be" in done.stdout and "preserve" in done.stdout.splitlines()[-3]
    assert (tmp_path / "out" / "fidelity.png").read_bytes()[:4] == b"\x89PNG"
    rows = list(csv.DictReader((tmp_path / "out" / "fidelity.csv").open()))
    assert len(rows) == 2 * 11 * len(COLUMNS)
    by = {(row["temperature"], row["baseline"], row["metric"]): row for row in rows}
    assert by["matched", FULL, "Gram rho"]["paper mean"] == "0.71"
    for column in ("PR rel. err.", "k_t match"):                         # the null that cannot differ
        assert float(by["matched", PERMUTED, column]["mean"]) == pytest.approx(
            float(by["matched", FULL, column]["mean"]), rel=1e-9)
    assert (tmp_path / "out" / "fidelity.md").read_text().count("| Full gradient |") == 2


@pytest.mark.slow
def test_quick_program(tmp_path):
    done = program("--quick", "--groups", "4", "--group-size", "4", "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "after 0 GRPO updates" in done.stdout and "after 2 GRPO updates" in done.stdout
