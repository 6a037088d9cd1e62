"""A user's mistake in training: one line, exit status 2, and no output directory left behind."""
import csv
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from salt import models, rollout
from salt.config import TINY, parse
from salt.errors import UserError
from salt.metrics import RunDirectory
from toy.arithmetic import warm_start
from training import ROOT, SMALL, Reward, lines, run


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    """curves.png takes three quarters of so short a run."""
    monkeypatch.setattr(RunDirectory, "draw", lambda run_directory: None)


def refused(model, output, *flags: str) -> str:
    """The message of the refusal; the output directory does not exist afterwards."""
    with pytest.raises(UserError) as caught:
        run(model, output, *flags)
    assert not output.exists()
    return str(caught.value)


FLAGS = [
    ("--no-such-flag", "no-such-flag"), ("--step 3", "--step"), ("--batch-size many", "batch-size"),
    ("--batch-size 1.5", "batch-size"), ("--algo ppo", "grpo, dapo"), ("--salt nothing", "only-main"),
    ("--salt-preset theirs", "released-code"), ("--regularizer l2", "clip-cov"), ("--aggregation mean", "token-mean"),
    ("--length-norm max", "mean, sum"), ("--diagnostics maybe", "on, off"),
    ("--batch-size 4 --mini-batch 3", "not a multiple"), ("--salt --salt-scope 3", "divides"),
    ("--salt --salt-scope 16", "divides"), ("--salt --salt-scope 0", "divides"), ("--salt --salt-scope -4", "divides"),
    ("--salt --salt-scope prompt", "mini-batch, group"), ("--salt --salt-scope ²", "salt-scope"),
    ("--temperature 0", "greedy"), ("--temperature -1", "temperature"), ("--top-p 0.9", "refused"),
    ("--top-k 50", "refused"), ("--dataset nothing", "gsm8k"), ("--split dev", "no split"), ("--limit 0", "limit"),
    ("--limit 1 --epochs 1", "do not fill one batch"), ("--max-prompt 2", "max-prompt"),
    ("--max-response 4000", "context"), ("--algo dapo --gen-batch 99 --epochs 1", "do not fill one batch of 99"),
    ("--salt fixed-alpha --alpha 1.5", "alpha"), ("--salt fixed-alpha --alpha -0.1", "alpha"),
    ("--salt --rank-max 0", "rank-max"), ("--steps 0", "steps"), ("--steps -1", "steps"),
    ("--eval-every -1", "eval-every"), ("--eval-every 1 --dataset rows.jsonl", "--eval-dataset"),
    ("--seed 9223372036854775808", "2 ** 63"), ("--diagnose --resume runs/that", "--model runs/that/final"),
    ("--alpha 0.3", "only --salt fixed-alpha reads it"), ("--salt --alpha 0.3", "only --salt fixed-alpha reads it"),
    ("--regularizer kl-cov --clip-cov-low 0", "only --regularizer clip-cov reads it"),
    ("--entropy-coef 0.1", "only --regularizer entropy reads it"),
    ("--salt-scope group --diagnostics off", "--salt-scope: without --salt only the diagnostics read it"),
]


@pytest.mark.parametrize("flags, told", FLAGS, ids=[flags for flags, _ in FLAGS])
def test_a_wrong_flag_is_told(tiny_folder, tmp_path, flags, told):
    assert told in refused(tiny_folder, tmp_path / "run", *flags.split())


COUNTS = ("group_size", "batch_size", "mini_batch", "micro_batch", "epochs", "max_prompt", "max_response", "gen_batch",
          "max_gen_batches", "workers", "reward_timeout", "save_every", "eval_limit", "eval_samples")


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_count_is_at_least_one(name, value):
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} "):
        train.parse([f"--{name.replace('_', '-')}", value])


NUMBERS = ("temperature", "lr", "weight_decay", "max_grad_norm", "clip_low", "clip_high", "kl_coef", "entropy_coef",
           "clip_cov_ratio", "kl_cov_ratio", "kl_cov_coef", "rank_scale", "alpha", "eval_temperature", "top_p")


@pytest.mark.parametrize("name, value", [(name, value) for name in NUMBERS for value in ("nan", "inf", "-1")
                                         if value != "inf" or name not in ("max_grad_norm", "clip_high")])
def test_a_number_is_finite_and_not_negative(name, value):
    """But an infinite limit may say that there is none."""
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} "):
        train.parse([f"--{name.replace('_', '-')}", value])


def test_the_papers_table_is_the_default(monkeypatch):
    """Table 4: what a model other than tiny trains with, and what DAPO and the presets change."""
    config, resume, plan = train.parse(["--model", "deepseek-1.5b"])
    assert resume is None
    assert (config.group_size, config.batch_size, config.mini_batch, config.epochs) == (8, 64, 32, 2)
    assert (config.temperature, config.max_prompt, config.max_response) == (0.6, 1024, 8192)
    assert (config.lr, config.weight_decay, config.max_grad_norm) == (1e-6, 0.01, 1.0)
    assert (config.clip_low, config.clip_high, config.kl_coef, config.aggregation) == (0.2, 0.2, 0.001, "sequence-mean")
    dapo, *_ = train.parse(["--model", "deepseek-1.5b", "--algo", "dapo"])
    assert (dapo.clip_low, dapo.clip_high, dapo.kl_coef, dapo.aggregation) == (0.2, 0.28, 0.0, "token-mean")
    assert train.parse([])[0].lr == TINY["lr"] and train.parse(["--lr", "3e-6"])[0].lr == 3e-6
    assert train.parse(["--salt"])[0].salt == "salt" and train.parse([])[0].salt is None
    released, *_ = train.parse("--salt-preset released-code --length-norm mean".split())
    assert (released.salt_scope, released.length_norm, released.rank_max) == (8, "mean", 64)


# ---- data


DATA = {"absent": None, "empty": "", "not JSON": "question,answer\n1+1=,2\n", "no object": "[1, 2]\n",
        "no answer": '{"question": "1+1="}\n', "no question": '{"answer": "2"}\n',
        "empty question": '{"question": " ", "answer": "2"}\n',
        "no gold that parses": '{"question": "1+1=", "answer": ""}\n',
        "not text": "\x00\xff\n"}


@pytest.mark.parametrize("content", DATA.values(), ids=DATA)
def test_a_bad_data_file_is_named(tiny_folder, tmp_path, content):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    assert "rows.jsonl" in refused(tiny_folder, tmp_path / "run", "--dataset", str(path))


def test_what_is_evaluated_must_be_judged_as_what_is_trained_on(tiny_folder, tmp_path):
    (tmp_path / "data" / "gpqa").mkdir(parents=True)
    row = {"Question": "2?", "Correct Answer": "2", "Incorrect Answer 1": "1", "Incorrect Answer 2": "3",
           "Incorrect Answer 3": "4", "Record ID": "r"}
    with (tmp_path / "data" / "gpqa" / "test.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)
    told = refused(tiny_folder, tmp_path / "run", "--eval-every", "1", "--eval-dataset", "gpqa", "--data-dir",
                   str(tmp_path / "data"))
    assert "gpqa is judged as choice, arith as math" in told


def test_a_file_is_evaluated_only_with_another_data_set():
    assert train.parse(["--dataset", "rows.jsonl"])[0].eval_every == 0 < train.parse([])[0].eval_every
    assert train.parse(["--dataset", "rows.jsonl", "--eval-dataset", "arith"])[0].eval_every == TINY["eval_every"]


def test_a_cache_that_cannot_be_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SALT_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="SALT_CACHE"):
        warm_start()


def test_a_row_whose_gold_does_not_parse_is_skipped_and_named(tiny_folder, tmp_path, capsys):
    rows = [{"question": f"{i}+7=", "answer": str(i + 7) if i != 3 else "", "instruction": ""} for i in range(10, 15)]
    rows[2]["answer"] = ""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = run(tiny_folder, tmp_path / "run", "--dataset", str(tmp_path / "rows.jsonl"), "--steps", "1")
    assert len(records) == 1
    assert "skipped 1 row(s)" in capsys.readouterr().err


def test_a_data_set_that_the_tokenizer_cannot_spell_is_refused(tiny_folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "How much is 1+1?", "answer": "2"}\n')
    assert "cannot spell" in refused(tiny_folder, tmp_path / "run", "--dataset", str(tmp_path / "rows.jsonl"))


def test_a_run_that_forgot_salt_is_told_so(capsys, monkeypatch):
    parse(["--salt-preset", "released-code", "--rank-max", "4"])
    said = capsys.readouterr().out
    assert said == ("no --salt: the advantages stay GRPO's; --salt-preset and --rank-max decide what the diagnostics "
                    "measure\n")
    for flags in ([], ["--salt", "--rank-max", "4"], ["--diagnose", "--salt-scope", "group"]):
        parse(flags)
        assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "3")                                             # and only by one process
    parse(["--rank-max", "4"])
    assert capsys.readouterr().out == ""


def test_prompts_that_are_too_long_are_dropped_and_counted(tiny_folder, tmp_path, capsys):
    run(tiny_folder, tmp_path / "run", "--max-prompt", "8", "--steps", "1")
    said = capsys.readouterr().out
    dropped, total = map(int, re.search(r"dropped (\d+) of (\d+) prompts", said).groups())
    assert 0 < dropped < total == 16


# ---- models


@pytest.fixture
def damaged(tiny_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    return folder


def test_an_unknown_model_is_refused(tmp_path):
    for name in ("deepseek", "./absent", str(tmp_path)):
        assert re.search("unknown model|config.json", refused(name, tmp_path / "run"))


def test_a_model_without_an_output_projection_is_refused(tiny_folder, tmp_path, capfd):
    """A folder of the bare transformer: the library would make up a random head."""
    AutoModelForCausalLM.from_pretrained(tiny_folder).model.save_pretrained(tmp_path / "bare")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path / "bare")
    capfd.readouterr()
    assert "bare" in refused(tmp_path / "bare", tmp_path / "run", "--steps", "1")


def test_weights_that_are_cut_off_are_refused(damaged, tmp_path):
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "model" in refused(damaged, tmp_path / "run")


def test_weights_of_another_shape_are_refused(damaged, tmp_path):
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    assert "model" in refused(damaged, tmp_path / "run")


def test_a_folder_without_tokenizer_is_refused(damaged, tmp_path):
    for path in damaged.glob("*token*"):
        path.unlink()
    for path in damaged.glob("vocab*"):
        path.unlink()
    assert "token" in refused(damaged, tmp_path / "run")


# ---- the output directory


def test_an_output_that_cannot_be_is_refused(tiny_folder, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for name in ("file", "file/below", "x" * 300):
        with pytest.raises(UserError):
            run(tiny_folder, tmp_path / name)
    assert (tmp_path / "file").read_text() == "in the way"


# ---- what goes wrong in training


@pytest.mark.parametrize("mini_batch", ["2", "4"])
def test_a_run_that_diverges_ends_with_one_line(tiny_folder, tmp_path, mini_batch):
    """Weights beyond all bounds after the first update: seen by the next gradient, or by the next sampling."""
    with pytest.raises((UserError, SystemExit), match="diverged|not finite"):
        run(tiny_folder, tmp_path / "run", "--lr", "1e30", "--mini-batch", mini_batch, "--steps", "3")


def test_all_responses_empty(tiny_folder, tmp_path, monkeypatch):
    """No sampler writes them, but one of another kind could: the step is a step without tokens."""
    sampler = rollout.TransformersSampler

    class Silent(sampler):
        def _until_eos(self, row):
            return []

    monkeypatch.setattr(rollout, "TransformersSampler", Silent)
    records = run(tiny_folder, tmp_path / "run", "--salt", pool=Reward(lambda text: False))
    assert [record["length"] for record in records] == [0, 0]


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tiny_folder, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="cannot write the checkpoint .* No space left"):
        run(tiny_folder, tmp_path / "run")
    assert len(lines(tmp_path / "run")) == 2


# ---- the real program


def program(*flags) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "train.py", *map(str, flags)], cwd=ROOT, capture_output=True, text=True,
                          timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


@pytest.mark.slow
@pytest.mark.parametrize("flags, told", [
    ("--batch", "--batch"), ("--dataset absent.jsonl", "absent.jsonl"), ("--model nobody/nothing", "nobody/nothing"),
    ("--algo dapo --gen-batch 4 --max-gen-batches 2 --batch-size 8 --mini-batch 8 --epochs 50",
     "in 2 generation batches of 4 prompts")])
def test_the_program_says_it_in_one_line_with_status_2(tiny_folder, tmp_path, flags, told):
    ended = program("--model", tiny_folder, *SMALL, "--output", tmp_path / "run", *flags.split())
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1 and told in ended.stderr
    assert not (tmp_path / "run").exists() or "generation batches" in told


@pytest.mark.slow
def test_the_program_trains_quietly_with_status_0(tiny_folder, tmp_path):
    ended = program("--model", tiny_folder, *SMALL, "--output", tmp_path / "run", "--salt")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(lines(tmp_path / "run")) == 2
    again = program("--model", tiny_folder, *SMALL, "--output", tmp_path / "run")
    assert again.returncode == 2 and "already holds something" in again.stderr


def test_presets_are_known_by_name():
    assert {"tiny", "deepseek-1.5b", "deepseek-7b"} <= set(models.PRESETS)
