"""Samples per problem with their verdicts, kept as data, and the paper's numbers with their uncertainty.

Glossary
    paper     name                  shape    equation
    ACC       avg                   ()       –     mean over problems and their n samples
    pass@k    pass@k                ()       54    with the estimator of salt/stats.py
    n         samples               ()       54    drawn per problem
    c         correct               ()       54    of one row: 1 or 0; c is their sum over a problem's rows

A row is one (problem, sample): id, sample, seed, prompt (a hash of its tokens), text, tokens (their number), finish
("stop" or "length"), answer, gold (of a program's tests a hash), correct.

Departures from the paper
    1. Standard errors are clustered by problem; the paper gives none for its main table.
"""
import fcntl
import hashlib
import json
from pathlib import Path
from typing import Iterator

from salt.data import Problem, stable_seed
from salt.errors import UserError
from salt.reward import extract_answer, extract_choice, extract_code
from salt.stats import clustered_mean, pass_at_k

EXTRACT = {"math": extract_answer, "choice": extract_choice, "code": extract_code}


def evaluate_problems(sampler, tokenizer, problems: list[Problem], pool, *, samples: int, temperature: float,
                      max_tokens: int, seed: int, problems_per_call: int = 32,
                      recorded: dict | None = None) -> Iterator[dict]:
    """One row per (problem, sample), in their order.

    Problems go to the sampler in batches fixed by their order, each with a seed of its own, so a batch comes out the
    same whether or not the ones before it were drawn in this process. Several processes share each batch, and all get
    all rows. recorded: {(id, sample): row} of an earlier start; a batch it holds completely is not drawn again.
    """
    from salt import distributed                                 # torch takes seconds: mistakes are to be told before
    from salt.models import encode_prompt
    from salt.rollout import Rollouts
    recorded = recorded or {}
    for number, start in enumerate(range(0, len(problems), problems_per_call)):
        called = problems[start:start + problems_per_call]
        batch = [(problem, sample) for problem in called for sample in range(samples)]
        if all((problem.id, sample) in recorded for problem, sample in batch):
            yield from (recorded[problem.id, sample] for problem, sample in batch)
            continue
        own = [called[index] for index in distributed.share(len(called))]
        prompts = [encode_prompt(tokenizer, problem.question, problem.instruction) for problem in own]
        drawn = sampler.generate(prompts, samples, temperature=temperature, max_tokens=max_tokens,
                                 seed=distributed.own_seed(stable_seed("evaluation", seed, number)))
        golds = [problem.answer for problem in own for _ in range(samples)]
        verdicts = sum(distributed.gather_objects(pool.submit(drawn.texts, golds).result()), [])
        drawn = Rollouts.join(distributed.gather_objects(drawn))
        for index, (problem, sample) in enumerate(batch):
            yield recorded.get((problem.id, sample)) or {
                "id": problem.id, "sample": sample, "seed": seed, "prompt": digest(drawn.prompts[index]),
                "text": drawn.texts[index], "tokens": len(drawn.responses[index]),
                "finish": "stop" if drawn.finished[index] else "length",
                "answer": EXTRACT[problem.kind](drawn.texts[index]), "gold": gold_record(problem),
                "correct": int(verdicts[index] > 0)}


def gold_record(problem: Problem) -> str:
    """What a row keeps of the gold: all of it, but of a program's tests, up to 200 kB, a hash."""
    return digest(problem.answer) if problem.kind == "code" else problem.answer


def problem_scores(rows: list[dict], k: int | None = None) -> dict[tuple, float]:
    """(seed, problem) -> the share of right samples, or with k pass@k. Raises ValueError if k > n."""
    verdicts: dict[tuple, list[int]] = {}
    for row in rows:
        verdicts.setdefault((row["seed"], row["id"]), []).append(row["correct"])
    return {key: pass_at_k(len(v), sum(v), k) if k else sum(v) / len(v) for key, v in verdicts.items()}      # Eq. 54


def summarise(rows: list[dict], ks=(1,)) -> dict[str, float]:
    """Numbers of one run, or of several together: avg and pass@k with standard errors clustered by problem (`_se`),
    shares of responses cut off and without an answer, mean length in tokens. Raises ValueError if k > n."""
    columns = {"avg": problem_scores(rows)} | {f"pass@{k}": problem_scores(rows, k) for k in dict.fromkeys(ks)}
    problems = [problem for _, problem in columns["avg"]]
    summary = {"problems": len(set(problems)), "samples": len(rows)}
    for name, scores in columns.items():
        summary[name], summary[f"{name}_se"] = clustered_mean(list(scores.values()), problems)
    return summary | {"truncated": sum(row["finish"] == "length" for row in rows) / len(rows),
                      "no_answer": sum(row["answer"] is None for row in rows) / len(rows),
                      "tokens": sum(row["tokens"] for row in rows) / len(rows)}


def digest(*parts) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def read_samples(path: Path) -> tuple[list[dict], int]:
    """The rows of a samples file, and how many of its bytes they fill: a crash may leave a broken line behind them."""
    if not path.is_file():
        raise UserError(f"{path} is missing: evaluate again without --rescore or --compare")
    *lines, _ = path.read_bytes().split(b"\n")
    rows, whole = [], 0
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            row["key"], row["id"], row["sample"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number}: broken in the middle of the file, which no crash does; delete the "
                            f"line, or choose another --output") from error
        rows.append(row)
        whole += len(line) + 1
    return rows, whole


class Samples:
    """The samples file of one task and run, open for appending. Only rows that carry `key` are used again."""

    def __init__(self, path: Path, key: str):
        self.key = key
        self.file = open(path, "ab")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{path} is being written by another process: wait for it, or choose --output") from error
        rows, whole = read_samples(path)
        self.file.truncate(whole)
        self.recorded = {(row["id"], row["sample"]): row for row in rows if row["key"] == key}

    def add(self, row: dict) -> dict:
        """Append the row unless it comes from the file; gives it back."""
        if (row["id"], row["sample"]) not in self.recorded:
            self.file.write(json.dumps({"key": self.key} | row).encode() + b"\n")
            self.file.flush()
        return row

    def close(self) -> None:
        self.file.close()
