"""Training with the real vLLM as the sampler, in one process and in two (in the environment of .ci/vllm-env)."""
import shutil
import time

import pytest

from salt.vllm_sampler import VLLMSampler
from test_parallel import program, taken
from training import lines, resume, run

VLLM = "--rollout vllm --salt --limit 8 --epochs 4 --steps 3 --save-every 1".split()


def test_three_steps_and_the_gap_after_every_sync(tiny_folder, tmp_path):
    """Step t samples with the weights that the sync of step t − 1 pushed: their log-probabilities are the trainer's."""
    records = run(tiny_folder, tmp_path / "run", *VLLM, "--eval-every", "3", "--eval-limit", "2", "--eval-samples", "2")
    trained = records[1:]
    assert len(trained) == 3 and all(0 < record["sampler_gap_max"] <= 1e-4 for record in trained)
    assert all("pr_total" in record for record in trained) and any("alpha" in record for record in trained)
    assert "eval_pass@1" in records[0] and "eval_pass@1" in records[-1]


def test_a_run_whose_sync_does_nothing_ends_with_one_line(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(VLLMSampler, "sync", lambda sampler, weights: None)
    with pytest.raises(SystemExit, match="stale weights"):
        run(tiny_folder, tmp_path / "run", *VLLM)
    assert len(lines(tmp_path / "run")) == 1                        # the second step is neither trained on nor saved
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_the_importance_weight_for_the_samplers_rounding_is_all_but_one(tiny_folder, tmp_path):
    plain = run(tiny_folder, tmp_path / "plain", *VLLM)
    weighted = run(tiny_folder, tmp_path / "weighted", *VLLM, "--tis-cap", "2")
    halved = run(tiny_folder, tmp_path / "halved", *VLLM, "--tis-cap", "0.5")
    assert weighted[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=1e-3)
    assert halved[0]["policy_loss"] == pytest.approx(plain[0]["policy_loss"] / 2, rel=1e-3, abs=1e-6)


def test_two_ranks_with_an_engine_each_lose_one_and_resume(tiny_folder, tmp_path):
    """The undisturbed run; then rank 1 is killed in step 3, after the checkpoint of step 2."""
    ended = program(tiny_folder, tmp_path / "run", *VLLM)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert all(record["sampler_gap_max"] <= 1e-4 for record in lines(tmp_path / "run"))
    begin = time.time()
    ended = program(tiny_folder, tmp_path / "lost", *VLLM, moment="rank 1 in step:3")
    took = time.time() - begin
    assert ended.returncode != 0 and "another process of this run was lost" in ended.stderr
    print(f"start, two steps and the end of a run that lost a rank: {took:.0f} s")
    ended = program(None, tmp_path / "lost")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert lines(tmp_path / "lost") == lines(tmp_path / "run")


def test_a_run_sampled_by_vllm_goes_on_in_one_process(tiny_folder, tmp_path):
    """The engine starts from the folder's weights: without a sync on resume the gap would end the run."""
    run(tiny_folder, tmp_path / "run", *VLLM)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000003")
    before = lines(tmp_path / "run")
    resume(tmp_path / "run")
    assert lines(tmp_path / "run") == before and len(taken(tmp_path / "run")) == 4
