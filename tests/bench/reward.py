"""Throughput of verdicts by number of workers: python tests/bench/reward.py [--count 4000] [--workers 1 2 4]

Each row is a kind of answer; of programs, a twentieth of the count. Golds repeat as they do in training (8 responses to
a problem), except where it says "all distinct". The first sixteenth is not counted: imports and tables are ready then.
"""
import argparse
import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from salt import code_tasks
from salt.reward import RewardPool


def integers(generator: random.Random) -> tuple[str, str]:
    return str(generator.randrange(1000)), str(generator.randrange(1000))


def short_latex(generator: random.Random) -> tuple[str, str]:
    a, b, c = (generator.randrange(2, 60) for _ in range(3))
    form = generator.choice(["\\frac{%d}{%d}", "%d\\sqrt{%d}", "(%d, %d)", "%d + %d\\pi", "x^{%d} + %d"])
    return form % (a, b), form % (a, generator.choice([b, c]))


def batch(kind: str, count: int) -> tuple[list[str], list[str]]:
    """count (response, gold) pairs; a response is a short calculation and its box."""
    generator = random.Random(0)
    make = integers if kind.startswith("integers") else short_latex
    repeat = 1 if "distinct" in kind else 8
    pairs = []
    while len(pairs) < count:
        gold, wrong = make(generator)
        right = gold.replace("\\frac", "\\dfrac").replace(" ", "").replace("\\sqrt", " \\sqrt")   # not the same text
        for _ in range(repeat):
            answer = wrong if len(pairs) % 2 else right
            pairs.append((f"First we add, then we divide. The answer is \\boxed{{{answer}}}.", gold))
    responses, golds = zip(*pairs[:count])
    return list(responses), list(golds)


def programs(count: int) -> tuple[list[str], list[str]]:
    """count (response, gold) pairs: right and wrong sums in turn, judged as a row of MBPP."""
    row = {"text": "Add.", "code": "def add(a, b): return a + b", "test_setup_code": "",
           "test_list": [f"assert add({i}, 2) == {i + 2}" for i in range(3)]}
    responses = [f"So:\n```python\ndef add(a, b):\n    return a + {part}\n```\n" for part in ("b", "2 * b")]
    return (responses * count)[:count], [code_tasks.mbpp(row)[1]] * count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=4000, help="answers per measurement")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="numbers of workers")
    arguments = parser.parse_args()
    print(f"verdicts per second, {arguments.count} answers, {os.cpu_count()} cores")
    print(f"{'answers':30}" + "".join(f"{workers:>8} workers" for workers in arguments.workers))
    kinds = ["integers", "short LaTeX", "short LaTeX, all distinct", "programs, three tests each"]
    rates = {}
    for workers in arguments.workers:
        for kind in kinds:
            code = kind.startswith("programs")
            responses, golds = programs(arguments.count // 20) if code else batch(kind, arguments.count)
            with RewardPool("code" if code else "math", workers=workers) as pool:
                first = len(responses) // 16
                pool.score(responses[:first], golds[:first])
                begin = time.perf_counter()
                pool.score(responses[first:], golds[first:])
                rates[kind, workers] = (len(responses) - first) / (time.perf_counter() - begin)
    for kind in kinds:
        print(f"{kind:30}" + "".join(f"{rates[kind, workers]:14,.0f}  " for workers in arguments.workers))


if __name__ == "__main__":
    main()
