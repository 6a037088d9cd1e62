"""Evaluation: samples per problem, their verdicts, and the paper's numbers with their uncertainty.

    python eval.py                                            the newest run under runs/, on its own task
    python eval.py --model FOLDER --tasks gsm8k,math500       any Hugging Face folder, hub id or run directory
    python eval.py --model deepseek-1.5b                      the paper's protocol: five benchmarks, n = 8, five runs
    python eval.py --compare RUN_A RUN_B                      paired differences A - B of two finished evaluations

Samples are data: one line of JSON per (problem, sample), appended as soon as it is judged. A second start continues
where the first was interrupted, with the very samples it would have drawn; --rescore judges them again.

    samples/<task>-seed<seed>.jsonl    results.json    results.md    results.csv

Departures from the paper
    1. With a single run per side, --compare resamples problems; App. H always resamples runs.
    2. Student's t interval stands beside App. H's bootstrap, which is too narrow for five runs (salt/stats.py).
"""
import argparse
import contextlib
import hashlib
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

from salt.data import NAMES, SOURCES, Problem, load_problems
from salt.errors import Parser, UserError, run
from salt.evaluation import (EXTRACT, Samples, digest, evaluate_problems, gold_record, problem_scores, read_samples,
                             summarise)
from salt.report import draw_differences, to_csv, to_json, to_markdown, to_text, write
from salt.reward import RewardPool
from salt.stats import mean_interval, paired_bootstrap

PAPER_TASKS = ("aime24", "aime25", "gsm8k", "math500", "gpqa")
PAPER_RUNS = 5
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


# ---------------------------------------------------------------------------------------------------- what to evaluate


def find_model(name: str | None) -> SimpleNamespace:
    """source (folder, preset or hub id), the run's configuration if it is a run, and where results go."""
    if name is None:
        finished = [path.parent for path in Path("runs").glob("*/final")]
        runs = [path for path in finished if "dataset" in read_json(path / "config.json")]
        if not runs:
            raise UserError("no finished run under runs/: train one with python train.py, or pass --model")
        name = str(max(runs, key=lambda path: (path / "final").stat().st_mtime))
        print(f"evaluating {name}", file=sys.stderr)
    folder = Path(name)
    if "dataset" in (config := read_json(folder / "config.json")):
        if not (folder / "final").is_dir():
            raise UserError(f"{name} is a run that has not finished (no final/): python train.py --resume {name}")
        return SimpleNamespace(source=str(folder / "final"), config=config, output=folder / "eval")
    if config and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise UserError(f"{name} holds no tokenizer ({', '.join(TOKENIZER_FILES)}): copy the model's own into it")
    label = re.sub(r"[^\w.-]+", "-", name).strip("-.")
    return SimpleNamespace(source=name, config={}, output=Path("runs") / f"eval-{label}")


def read_json(path: Path) -> dict:
    """The object in a file of JSON, {} where there is no such file."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return content if isinstance(content, dict) else {}


def settle(args, config: dict) -> None:
    """What was not asked for follows from the run, from the tiny model, or from the paper's protocol."""
    own = config.get("dataset") or ("arith" if args.model == "tiny" else None)
    args.runs = args.runs or (1 if args.tasks or own else PAPER_RUNS)
    args.tasks = list(dict.fromkeys(args.tasks.split(","))) if args.tasks else [own] if own else list(PAPER_TASKS)
    args.n = args.n or config.get("eval_samples", 8)
    args.data_dir = args.data_dir or config.get("data_dir")
    if args.temperature is None:
        args.temperature = config.get("eval_temperature", config.get("temperature", 0.6))
    args.max_response = args.max_response or config.get("max_response") or (64 if args.model == "tiny" else 8192)
    if not 0 <= args.temperature < math.inf or (args.temperature == 0 and args.n > 1):
        raise UserError(f"--temperature {args.temperature}: above 0, or 0 (greedy) with --n 1")
    args.k = args.k or sorted({1, args.n})
    check_k(args.k, args.n)


def check_k(ks: list[int], n: int) -> None:
    if max(ks) > n:
        raise UserError(f"--k {','.join(map(str, ks))}: pass@k needs k <= n, and n is {n}")


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {path}: {error.strerror}; choose another --output") from error


def load_tasks(args) -> dict[str, list[Problem]]:
    tasks = {Path(task).name: load_problems(task, data_dir=args.data_dir, limit=args.limit) for task in args.tasks}
    if len(tasks) < len(args.tasks):
        raise UserError(f"two of the files in --tasks {','.join(args.tasks)} have the same name: rename one")
    return tasks


def fingerprint(source: str, model) -> str:
    """The hub's commit, or a hash of the folder's weights, configuration and tokenizer."""
    folder = Path(source)
    if not folder.is_dir():
        return getattr(model.config, "_commit_hash", None) or source
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".bin", ".json", ".model",
                                                                          ".txt", ".jinja")]
    contents = []
    for path in files:
        with open(path, "rb") as file:
            contents.append((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
    return digest(contents)


def room_for_response(model, prompts: dict[str, list[int]], wanted: int, task: str) -> int:
    """`wanted` tokens, or as many as the model's context leaves behind the longest prompt."""
    context = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    longest = max(prompts, key=lambda name: len(prompts[name]))
    room = context - len(prompts[longest])
    if room < 1:
        raise UserError(f"the prompt of {longest} has {len(prompts[longest])} tokens: it does not fit the model's "
                        f"context of {context}; leave {task} out, or take another model")
    if room < wanted:
        print(f"{task}: responses end after {room} tokens, not {wanted}: the model's context is {context}",
              file=sys.stderr)
    return min(wanted, room)


# -------------------------------------------------------------------------------------------------------- evaluations


def evaluate(target, args, output: Path) -> tuple[dict, dict[str, list[list[dict]]]]:
    """Draw and judge what is missing: (settings and files, rows by task and run)."""
    settle(args, target.config)
    import torch
    from salt import models
    from salt.metrics import provenance
    from salt.rollout import TransformersSampler, choose_backend, make_sampler
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    source = models.resolve(target.source)
    tasks = load_tasks(args)
    backend = choose_backend(args.rollout, gpu=device == "cuda")
    model, tokenizer = models.load(source, device=device if backend == "transformers" else "cpu", dtype=dtype)
    prompts = {task: {p.id: models.encode_prompt(tokenizer, p.question, p.instruction) for p in problems}
               for task, problems in tasks.items()}
    limits = {task: room_for_response(model, asked, args.max_response, task) for task, asked in prompts.items()}
    if backend == "transformers":
        sampler = TransformersSampler(model, tokenizer, rows_per_call=args.batch)
    else:
        context = max(limits[task] + max(map(len, asked.values())) for task, asked in prompts.items())
        sampler = make_sampler(backend, model, tokenizer, source, context=context, dtype=dtype, memory_share=0.85)
    sampling = {"samples": args.n, "temperature": args.temperature}
    drawn_by = {"revision": fingerprint(source, model), "precision": f"{dtype} on {device}", "sampler": backend,
                "batch": args.batch}
    settings = {"model": args.model or target.source, **drawn_by, **sampling, "k": args.k}
    results, rows = {"settings": settings, "tasks": {}, "provenance": provenance()}, {}
    for task, problems in tasks.items():
        kind = problems[0].kind
        limit = limits[task]
        entry = results["tasks"][task] = {"kind": kind, "max_response": limit, "problems": digest(problems), "runs": []}
        rows[task] = []
        make_folder(output / "samples")
        if kind == "choice":                             # GPQA's authors ask that no copy of a question gets published
            (output / "samples" / ".gitignore").write_text("*\n")
        with reward_pool(task, kind, args) as pool:
            for seed in range(args.seed, args.seed + args.runs):
                path = output / "samples" / f"{task}-seed{seed}.jsonl"
                key = digest(drawn_by, sampling, limit, problems, prompts[task], seed)
                with contextlib.closing(Samples(path, key)) as samples:
                    drawn = evaluate_problems(
                        sampler, tokenizer, problems, pool, **sampling, max_tokens=limit, seed=seed,
                        problems_per_call=max(1, args.batch // args.n), recorded=samples.recorded)
                    progress = tqdm(drawn, f"{task}, seed {seed}", len(problems) * args.n, disable=None, leave=False)
                    rows[task].append([samples.add(row) for row in progress])
                entry["runs"].append({"seed": seed, "file": path.name, "key": key})
    sampler.close()
    return results, rows


def reward_pool(task: str, kind: str, args) -> RewardPool:
    limits = {"timeout": SOURCES[task].seconds, "memory": SOURCES[task].memory} if task in SOURCES else {}
    return RewardPool(kind, args.workers, allow_weak_sandbox=args.allow_weak_sandbox, **limits)


def recorded_tests(task: str, rows: list[dict], args) -> list[str]:
    """The tests of the rows' problems, which their file holds only as a hash."""
    problems = {problem.id: problem for problem in load_problems(task, data_dir=args.data_dir)}
    for row in rows:
        if row["id"] not in problems or gold_record(problems[row["id"]]) != row["gold"]:
            raise UserError(f"the tests of {row['id']} are not those it was judged by: pass the --data-dir of then")
    return [problems[row["id"]].answer for row in rows]


def rescore(output: Path, args) -> tuple[dict, dict[str, list[list[dict]]]]:
    """Judge the recorded samples again, in place; nothing is drawn."""
    results = read_results(output)
    output = results.pop("folder")
    args.k = args.k or results["settings"]["k"]
    check_k(args.k, results["settings"]["samples"])
    rows = {}
    for task, entry in results["tasks"].items():
        kind = entry["kind"]
        with reward_pool(task, kind, args) as pool:
            for record in entry["runs"]:
                path = output / "samples" / record["file"]
                old, _ = read_samples(path)
                golds = recorded_tests(task, old, args) if kind == "code" else [row["gold"] for row in old]
                verdicts = pool.score([row["text"] for row in old], golds)
                new = [row | {"answer": EXTRACT[kind](row["text"]), "correct": int(verdict > 0)}
                       for row, verdict in zip(old, verdicts)]
                write(path, "".join(json.dumps(row) + "\n" for row in new))
                rows.setdefault(task, []).append([row for row in new if row["key"] == record["key"]])
                changed = sum(row["correct"] != before["correct"] for row, before in zip(new, old))
                print(f"{task}, seed {record['seed']}: {changed} of {len(new)} verdicts changed", file=sys.stderr)
    return results, rows


def report(results: dict, rows: dict[str, list[list[dict]]], output: Path, ks: list[int]) -> None:
    """Numbers into results.json, .md and .csv, and the table on the terminal."""
    results["settings"]["k"] = ks
    for task, entry in results["tasks"].items():
        entry["runs"] = [{name: record[name] for name in ("seed", "file", "key")} | summarise(drawn, ks)
                         for record, drawn in zip(entry["runs"], rows[task])]
        entry["all"] = summarise([row for drawn in rows[task] for row in drawn], ks)
    names = ["avg", *(f"pass@{k}" for k in ks)]
    header = ["task", "problems", f"avg@{results['settings']['samples']}", *names[1:], "cut off", "no answer", "tokens"]
    table = []
    for task, entry in results["tasks"].items():
        total = entry["all"]
        table.append([task, str(total["problems"]), *(_cell(entry, name) for name in names),
                      f"{100 * total['truncated']:.1f}", f"{100 * total['no_answer']:.1f}", f"{total['tokens']:.0f}"])
    note = "Percent ± standard error clustered by problem."
    if any(len(entry["runs"]) > 1 for entry in results["tasks"].values()):
        note += " In brackets: 95 % interval of the mean over runs (Student's t)."
    lines = [{"task": task, "run": record.get("seed", "all"), **record}
             for task, entry in results["tasks"].items() for record in [entry["all"], *entry["runs"]]]
    write(output / "results.json", to_json(results))
    write(output / "results.md", f"{results['settings']['model']}\n\n{to_markdown(header, table)}\n{note}\n")
    write(output / "results.csv", to_csv(lines))
    print(f"{to_text(header, table)}\n{note}\nsamples and tables: {output}")


def _cell(entry: dict, name: str) -> str:
    text = f"{100 * entry['all'][name]:.1f} ± {100 * entry['all'][f'{name}_se']:.1f}"
    if len(entry["runs"]) > 1:
        _, low, high = mean_interval([record[name] for record in entry["runs"]])
        text += f" [{100 * low:.1f}, {100 * high:.1f}]"
    return text


# -------------------------------------------------------------------------------------------------------- comparison


def read_results(folder: Path) -> dict:
    """results.json of an evaluation's folder, or of a run directory's."""
    for path in (folder / "results.json", folder / "eval" / "results.json"):
        if path.is_file():
            return read_json(path) | {"folder": path.parent}
    raise UserError(f"no finished evaluation in {folder} (no results.json): run eval.py on it first")


def compare(first: str, second: str, output: Path) -> None:
    """Paired bootstrap of A - B per task (App. H); each side one evaluation, or several separated by commas."""
    if first.count(",") != second.count(","):
        raise UserError(f"--compare {first} {second}: as many evaluations on either side, in matching order")
    pairs = [(read_results(Path(a)), read_results(Path(b))) for a, b in zip(first.split(","), second.split(","))]
    lines = []
    for task in pairs[0][0]["tasks"]:
        if not all(task in side["tasks"] for pair in pairs for side in pair):
            continue
        for name in ["avg", *(f"pass@{k}" for k in pairs[0][0]["settings"]["k"])]:
            if all(name in side["tasks"][task]["all"] for pair in pairs for side in pair):
                a, b, over = _matched(pairs, task, name)
                delta, low, high = paired_bootstrap(a, b)
                _, t_low, t_high = mean_interval([x - y for x, y in zip(a, b)])
                lines.append({"task": task, "metric": name, "a": sum(a) / len(a), "b": sum(b) / len(b), "delta": delta,
                              "plus": high - delta, "minus": delta - low, "t_low": t_low, "t_high": t_high,
                              "over": over})
    if not lines:
        raise UserError(f"{first} and {second} have no task in common")
    header = ["task", "metric", "A", "B", "A - B", "+u", "-l", "Student's t", "over"]
    table = [[line["task"], line["metric"], f"{100 * line['a']:.1f}", f"{100 * line['b']:.1f}",
              f"{100 * line['delta']:+.1f}", f"{100 * line['plus']:+.1f}", f"{-100 * line['minus']:+.1f}",
              f"[{100 * line['t_low']:+.1f}, {100 * line['t_high']:+.1f}]", line["over"]] for line in lines]
    make_folder(output)
    write(output / "compare.json", to_json(lines))
    write(output / "compare.md", f"A = {first}, B = {second}\n\n{to_markdown(header, table)}")
    write(output / "compare.csv", to_csv(lines))
    draw_differences(lines, output / "compare.png", f"{first} minus {second}")
    print(f"A = {first}, B = {second}\n{to_text(header, table)}\ntables and figure: {output}")


def _matched(pairs: list, task: str, name: str) -> tuple[list[float], list[float], str]:
    """The scores to pair: those of runs with equal seeds, or of the problems where there is one run only."""
    runs = []
    for a, b in pairs:
        for field, left, right in [(f, a["settings"][f], b["settings"][f]) for f in ("samples", "temperature")] + [
                (f, a["tasks"][task][f], b["tasks"][task][f]) for f in ("max_response", "problems")]:
            if left != right:
                raise UserError(f"{task}: the two evaluations differ in {field} ({left}, {right}): evaluate them alike")
        by_seed = {record["seed"]: record for record in b["tasks"][task]["runs"]}
        runs += [((a["folder"], record), (b["folder"], by_seed[record["seed"]]))
                 for record in a["tasks"][task]["runs"] if record["seed"] in by_seed]
    if not runs:
        raise UserError(f"{task}: no run of the two evaluations has the same seed: pass the same --seed to both")
    if len(runs) > 1:
        return *([pair[side][1][name] for pair in runs] for side in (0, 1)), f"{len(runs)} runs"
    k = None if name == "avg" else int(name.removeprefix("pass@"))
    scores = []
    for folder, record in runs[0]:
        rows = read_samples(folder / "samples" / record["file"])[0]
        scores.append(problem_scores([row for row in rows if row["key"] == record["key"]], k))
    return *([side[problem] for problem in scores[0]] for side in scores), f"{len(scores[0])} problems"


# -------------------------------------------------------------------------------------------------------- command line


def parse(argv: list[str] | None):
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"a whole number of at least 1, not {text!r}")
        return int(text)

    parser = Parser(prog="eval.py", description="avg@n and pass@k of a model, with their standard errors")
    parser.add_argument("--model", help="run directory, folder, preset or hub id (default: the newest run in runs/)")
    parser.add_argument("--tasks", help=f"comma-separated: {', '.join(NAMES)}, or data files (default: the run's own; "
                                        f"else the paper's five, {PAPER_RUNS} runs)")
    parser.add_argument("--n", type=count, help="samples per problem (default 8)")
    parser.add_argument("--k", type=lambda text: [count(part) for part in text.split(",")],
                        help="comma-separated k of pass@k, at most n (default: 1 and n)")
    parser.add_argument("--temperature", type=float, help="of the sampler (default: the run's, else 0.6)")
    parser.add_argument("--max-response", type=count, help="tokens (default: the run's, else 8192; tiny: 64)")
    parser.add_argument("--runs", type=count, help="repetitions, with seeds SEED, SEED + 1, … (default 5 for the "
                        "paper's protocol, else 1)")
    parser.add_argument("--seed", type=int, default=2025, help="seed of the first run (default 2025)")
    parser.add_argument("--limit", type=count, help="the first N problems of each task only")
    parser.add_argument("--data-dir", help="folder with local copies of the data sets (default: the hub)")
    parser.add_argument("--output", type=Path, help="folder (default: eval/ inside the run, else runs/eval-MODEL)")
    parser.add_argument("--rollout", default="auto", help="auto, transformers or vllm (default auto: vllm where "
                                                          "it and a GPU are there)")
    parser.add_argument("--batch", type=count, default=256, help="responses per generate call (default 256)")
    parser.add_argument("--workers", type=count, default=2, help="reward processes (default 2)")
    parser.add_argument("--allow-weak-sandbox", action="store_true",
                        help="judge generated programs even where they cannot be isolated: they then run as you")
    parser.add_argument("--rescore", action="store_true", help="judge the recorded samples again, draw none")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"),
                        help="paired difference A - B of finished evaluations; several per side: separated by commas")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.compare:
        compare(*args.compare, args.output or Path("runs/compare"))
        return 0
    target = None if args.rescore and args.output else find_model(args.model)
    output = args.output or target.output
    results, rows = rescore(output, args) if args.rescore else evaluate(target, args, output)
    report(results, rows, output, args.k)
    return 0


if __name__ == "__main__":
    run(main)
