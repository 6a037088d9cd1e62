r"""Verdicts: pairs of answers with their documented verdict, real golds, hostile answers, and workers that die."""
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from salt import code_tasks, sandbox
from salt.errors import UserError
from salt.reward import (CHUNK, MAX_ANSWER, MAX_PROGRAM, INTEGER, RewardPool, _trim, choice_reward, code_reward,
                         extract_answer, extract_choice, extract_code, gold_parses, math_reward)

ROOT = Path(__file__).resolve().parents[1]


def box(answer: str) -> str:
    return f"So the answer is \\boxed{{{answer}}}."


# Rows are (gold, answer). A third entry says why the verdict is the other one: math-verify is wrong there, or lenient.
EQUIVALENT = [row.split(" <- ") for row in r"""
42 <- 42
42 <- 042
025 <- 25
-7 <- -7
5 <- +5
0 <- -0
1,000 <- 1000
1000 <- 1,000
1234567 <- 1,234,567
1{,}234 <- 1234
5 <- 5.0
5 <- 5.
5 <- 5\,
5 <- $5$
5 <- \$5
5 <- 5\text{ cm}
5 <- 5\mathrm{~cm}
15\mbox{ cm}^2 <- 15
5 <- x = 5
x=5 <- 5
7 <- 3+4=7
7 <- \textbf{7}
7 <- \text{7}
336^\circ <- 336
336 <- 336^{\circ}
90 <- 90\text{ degrees}
\$12,750 <- 12750
7.90 <- \$7.90
\frac{1}{2} <- 0.5
\frac12 <- \frac{1}{2}
\frac{1}{2} <- 1/2
\dfrac{3}{4} <- \tfrac{6}{8}
-\frac{1}{2} <- \frac{1}{-2}
1/3 <- 0.333333
2\frac{1}{2} <- \frac{5}{2}
1/2/3 <- 1/6
\sqrt{2} <- 2^{1/2}
\sqrt{8} <- 2\sqrt{2}
\frac{1}{\sqrt{2}} <- \frac{\sqrt{2}}{2}
13\sqrt2 <- 13\sqrt{2}
\frac{\pi}{2} <- \pi/2
\pi <- π
x^2+2x+1 <- (x+1)^2
a - b <- -b+a
e^{2} <- e^2
\log_2 8 <- 3
\sin(\pi/6) <- \frac{1}{2}
3! <- 6
\binom{5}{2} <- 10
2^{10} <- 1024
1.5\times 10^3 <- 1500
50\% <- 0.5
\frac{1}{2} <- 50\%
(1,2) <- \left(1,2\right)
\{1,2\} <- \{2,1\}
1,2 <- 2,1
1, 2 <- 1 \text{ and } 2
1,2 <- \{1,2\}
1 \pm \sqrt{19} <- 1+\sqrt{19}, 1-\sqrt{19}
[0,1] <- \left[0,1\right]
(-\infty,2)\cup(2,\infty) <- (-\infty, 2) \cup (2, \infty)
x>2 <- 2<x
x\ge 2 <- [2,\infty)
\begin{pmatrix}1&2\\3&4\end{pmatrix} <- \begin{bmatrix}1&2\\3&4\end{bmatrix}
\begin{pmatrix}1/2\\2\end{pmatrix} <- \begin{pmatrix}0.5\\2\end{pmatrix}
\text{Maria} <- Maria
\text{yes} <- \text{Yes}
\text{(C)} <- C
3+4i <- 4i+3
y = 2x+1 <- 2x+1
y=2x+1 <- 2x - y = -1
3701_8 <- 3701_{8}
\infty <- \infty
\emptyset <- \{\}
\sqrt{2} <- √2 <- wrong: the Unicode root sign is not read
\emptyset <- \varnothing <- wrong: the other empty-set sign is an unknown symbol
[0,1] <- 0 \le x \le 1 <- strict: for a gold interval an inequality is another kind of object
[2,\infty) <- x\ge 2 <- strict: as above, though the reverse passes
i <- \sqrt{-1} <- wrong: the root is taken in a domain of reals
2i <- 2 i <- wrong: the space hides the imaginary unit
1 <- i^4 <- wrong: the power of the imaginary unit stays unevaluated
1000 <- 1\,000 <- wrong: a thin space as separator is read as a sum, 1 + 000
1000 <- 1 000 <- wrong: as above
""".strip().split("\n")]

DIFFERENT = [row.split(" <- ") for row in r"""
42 <- 43
42 <- -42
42 <- 420
42 <- 4.2
25 <- 0.25
12 <- 1,2
1000 <- 1,00
5 <- 5.0001
5 <- five
5 <- ?
5 <- 5 \text{ or } 6
5 <- 5, 6
5 <- x=6
x=5 <- y=5
7 <- 7=3
7 <- 7+1
12345678901234567890 <- 12345678901234567891
100000 <- 10^5+1
\frac{1}{3} <- 0.33
\frac{1}{2} <- \frac{2}{1}
\frac{1}{2} <- \frac{1}{20}
\frac{1}{2} <- 0.05
\frac{1}{2} <- -\frac{1}{2}
2\frac{1}{2} <- \frac{2}{2}
\frac{x}{y} <- \frac{y}{x}
\sqrt{2} <- 1.414
\sqrt{2} <- \sqrt{3}
\sqrt{2} <- 2
\sqrt{x^2} <- x
\pi <- 3.14
\pi <- \frac{22}{7}
2\pi <- \pi
336 <- 336\pi
x+1 <- x-1
x+1 <- y+1
(x+1)^2 <- x^2+1
x^2 <- 2x
\sin x <- \cos x
e^2 <- 2e
3! <- 3
\binom{5}{2} <- \frac{5}{2}
10^3 <- 10^4
50\% <- 5\%
0.5\% <- 0.5
(1,2) <- (2,1)
(1,2) <- (1,2,3)
(1,2) <- (1,2]
(1,2) <- 1
1 <- (1,2)
\{1,2\} <- \{1\}
1,2 <- 1
1,2 <- 1,3
1 \pm \sqrt{19} <- 1 + \sqrt{19}
(0,1) <- [0,1]
(-\infty,3) <- (-\infty,3]
(-\infty,2)\cup(2,\infty) <- (-\infty,\infty)
x>2 <- x<2
x>2 <- x\ge 2
x>2 <- 2
\begin{pmatrix}1&2\\3&4\end{pmatrix} <- \begin{pmatrix}1&3\\2&4\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} <- \begin{pmatrix}1&2\end{pmatrix}
\text{Maria} <- \text{Mar}
\text{even} <- \text{odd}
\text{(C)} <- \text{(B)}
3+4i <- 3-4i
i <- -i
y=2x+1 <- y=2x-1
120^\circ <- 60^\circ
\infty <- -\infty
\emptyset <- \{0\}
|x| <- x
1 <- \frac{0}{0}
1 <- 1^{\infty}
\pi <- 3.141593 <- lenient: decimals count as equal when six places agree
0.1 <- 0.10000001 <- lenient: as above
0.0000001 <- 0.0000004 <- wrong: as above, which for tiny numbers leaves no digit to compare
50\% <- 50 <- lenient: the sign may be forgotten
5 <- 500\% <- lenient: a percentage is also a number; 5 % passes too
5 \text{ cm} <- 5 \text{ m} <- wrong: units are dropped
1010_2 <- 1010 <- lenient: the base may be left out
\{1,2\} <- (1,2) <- lenient: a tuple passes for a gold set
(1,2) <- \{1,2\} <- wrong: a set passes for a gold tuple, in the order it is written
7 <- 3=7 <- lenient: of an equation the last right-hand side counts
5 <- 5\text{ (mod 7)} <- lenient: what follows a number as text is a unit
235 <- 1\,234 <- wrong: a thin space as separator is read as a sum, 1 + 234
""".strip().split("\n")]


@pytest.fixture(scope="module")
def pool():
    with RewardPool("math", workers=2, timeout=10) as pool:
        yield pool


@pytest.mark.parametrize("rows, verdict", [(EQUIVALENT, 1.0), (DIFFERENT, 0.0)], ids=["equivalent", "different"])
def test_documented_pairs(pool, rows, verdict):
    assert len(rows) - sum(len(row) == 3 for row in rows) >= 60
    expected = [verdict if len(row) == 2 else 1 - verdict for row in rows]
    found = pool.score([box(row[1]) for row in rows], [row[0] for row in rows])
    assert [row for row, want, got in zip(rows, expected, found) if want != got] == []


BOXES = [   # (response, text of the answer)
    ("no box: 42", None),
    ("", None),
    ("\\boxed{}", ""),
    ("first \\boxed{1} then \\boxed{2}", "2"),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("\\boxed {3}", "3"),
    ("\\fbox{3}", None),
    ("\\boxed 3", None),
    ("nested \\boxed{\\boxed{7}}", "7"),
    ("nested \\boxed{x = \\boxed{7}} end", "7"),
    ("unclosed \\boxed{7", None),
    ("cut off: \\boxed{1}, hence \\boxed{\\frac{2}{3}", "1"),
    ("unclosed outside { \\boxed{7}", "7"),
    ("too many } } \\boxed{7} }", "7"),
    ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
    ("\\boxed{\\left\\{ x \\right.}", "\\left\\{ x \\right."),
    ("\\boxed{a \\\\{b}}", "a \\\\{b}"),     # an escaped backslash, then a brace that counts
    ("<think>\\boxed{1}</think>\\boxed{2}", "2"),
    ("reasoning \\boxed{1}</think> no box here", None),
    ("<think>\\boxed{1}</think> no box here", None),
    ("a</think>\\boxed{1}</think>\\boxed{2}", "2"),
    ("\\boxed{1}</think>b</think>c", None),
    ("<think> never closed \\boxed{1}", "1"),   # documented: without </think> the whole text counts
    ("\\boxed{1</think>}", None),
]


@pytest.mark.parametrize("response, answer", BOXES)
def test_extract_answer(response, answer):
    assert extract_answer(response) == answer


def test_no_box_scores_zero_even_if_the_text_is_the_gold(pool):
    responses = ["42", "the answer is 42", "$42$", "\\boxed{42</think>", "\\boxed{42}</think>", "<think>\\boxed{42}"]
    assert pool.score(responses, ["42"] * 6) == [0.0] * 5 + [1.0]


def test_the_longest_answer_is_capped():
    digits = "9" * MAX_ANSWER
    assert math_reward(box(digits), digits) == 1.0
    assert math_reward(box(digits + "9"), digits + "9") == 0.0


def test_short_cuts_agree_with_math_verify():
    from math_verify import parse, verify   # with its own time limit: pytest runs on the main thread
    generator = random.Random(0)
    values = [0, 1, 7, 10, 25, 100, 120, 1000, 1234, 10_000, 999_999, 1_000_000, 12_345_678, 10**20]

    def forms(value):
        return [str(value), f"{value:,}", f"+{value}", f"-{value}", f"-{value:,}", f"0{value}", f"00{value}"]

    texts = [text for value in values for text in forms(value)]
    pairs = [(text, generator.choice(forms(value))) for value in values for text in forms(value)]
    pairs += [(generator.choice(texts), generator.choice(texts)) for _ in range(300)]
    for gold, answer in pairs:
        if not (INTEGER.fullmatch(gold) and INTEGER.fullmatch(answer)):
            continue   # "01,000" is no integer to either
        slow = verify(parse(f"\\boxed{{{gold}}}"), parse(f"\\boxed{{{answer}}}"))
        assert math_reward(box(answer), gold) == float(slow), (gold, answer)
    for gold in {row[0] for row in EQUIVALENT + DIFFERENT}:   # the other short cut: the same text is right
        assert verify(parse(f"\\boxed{{{gold}}}"), parse(f"\\boxed{{{gold}}}")) and math_reward(box(gold), gold) == 1
    assert math_reward(box(""), "") == math_reward(box(" ."), "") == 0.0
    for text in ["1,23", "1234,567", "12,34,567", "0,123", "٥", "1 234", "5.0", "--5", ""]:
        assert not INTEGER.fullmatch(text), text


@pytest.mark.parametrize("text, trimmed", [(" 5. ", "5"), ("5 .,", "5"), ("5\\,", "5\\,"), ("...", ""), ("a.b", "a.b")])
def test_trim(text, trimmed):
    assert _trim(text) == trimmed


def test_gold_parses():
    assert all(map(gold_parses, ["42", "1,000", "\\frac{1}{2}", "336^\\circ", "\\text{Maria}", "(1,2)", "x>2"]))
    assert not any(map(gold_parses, ["", "  ", ".", "\\frac{", "٥"]))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.open(encoding="utf-8")]


def test_math500_golds_against_their_solutions(shared_data, pool):
    problems = rows(shared_data / "math500" / "test.jsonl")
    verdicts = pool.score([row["solution"] for row in problems], [row["answer"] for row in problems])
    assert (sum(verdicts), len(verdicts)) == (500, 500)
    assert all(gold_parses(row["answer"]) for row in problems)


def test_aime_golds(shared_data, pool):
    import pyarrow.parquet
    golds = [row["answer"] for row in rows(shared_data / "aime24" / "test.jsonl")]
    golds += [row["answer"] for row in pyarrow.parquet.read_table(shared_data / "aime25" / "test.parquet").to_pylist()]
    plain = [gold.removesuffix("^\\circ").lstrip("0") for gold in golds]   # '025' as a model writes it: 25
    for answers in (golds, plain):
        assert sum(pool.score(list(map(box, answers)), golds)) == len(golds) == 60
    wrong = [str(int(answer) + 1) for answer in plain]
    assert sum(pool.score(list(map(box, wrong)), golds)) == 0


def test_gsm8k_golds(shared_data, pool):
    golds = [row["answer"].rpartition("#### ")[2] for row in rows(shared_data / "gsm8k" / "test.jsonl")]
    assert sum(pool.score(list(map(box, golds)), golds)) == len(golds) == 1319
    assert sum(pool.score([box(gold.replace(",", "")) for gold in golds], golds)) == 1319
    assert sum(pool.score([f"The answer is {gold}" for gold in golds], golds)) == 0


def nested(left: str, core: str, right: str, depth: int) -> str:
    return box(left * depth + core + right * depth)


HOSTILE = {   # name -> response; each is scored against four golds, and none is right
    "tower": box("9^{9^{9^9}}"), "tall tower": box("9^{9^{9^{9^{9}}}}"), "googolplex": box("10^{10^{10}}"),
    "power": box("2^{10^9}"), "powers": box("(((2^{99})^{99})^{99})^{99}"), "tiny power": box("2^{-10^{10}}"),
    "fraction of a tower": box("\\frac{1}{9^{9^9}}"), "programmer's tower": box("9**9**9**9"),
    "float power": box("1.5^{10^{12}}"), "root of a power": box("\\sqrt[3]{10^{10^8}}"),
    "log of a power": box("\\log(10^{10^{9}})"), "floor of a power": box("\\lfloor 10^{10^{9}}/7 \\rfloor"),
    "power modulo": box("7^{10^{10}} \\mod 13"), "gcd of a power": box("\\gcd(10^{10^8},2)"),
    "long exponent": box("1" + "0" * 900 + "^{" + "9" * 50 + "}"),
    "factorial": box("100000000!"), "iterated factorial": box("((10!)!)!"), "triple factorial": box("20000!!!"),
    "gamma": box("\\Gamma(10^9)"), "binomial": box("\\binom{10^9}{5\\cdot10^8}"),
    "binomial in digits": box("\\binom{100000000}{50000000}"),
    "binomial of binomials": box("\\binom{\\binom{100}{50}}{\\binom{90}{45}}"),
    "sum": box("\\sum_{k=1}^{10^{9}} \\frac{1}{k!}"),
    "triple sum": box("\\sum_{i=1}^{1000}\\sum_{j=1}^{1000}\\sum_{k=1}^{1000} i^j"),
    "product": box("\\prod_{k=1}^{10^8} k"), "integral": box("\\int_0^1 \\sin(\\sin(\\sin(\\cos(x^{x^x})))) dx"),
    "limit": box("\\lim_{x\\to 0} \\frac{\\sin(\\tan x)-\\tan(\\sin x)}{x^{77}}"),
    "polynomial": box("(x+y+z+w+1)^{200}"), "high polynomial": box("(1+x)^{10^6}"), "zeta": box("\\zeta(10^{10})"),
    "transcendental equation": box("x^{7}+x^{6}+3x^{5}+\\sin x=2^{x}"), "inequality": box("\\sin(x^2)+x^{9}>2^x+x^5"),
    "matrix power": box("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}^{1000000}"),
    "wide matrix": box("\\begin{pmatrix}" + "&".join(["1"] * 400) + "\\end{pmatrix}"),
    "continued fraction": nested("\\frac{1}{1+", "x", "}", 60), "parentheses": nested("(", "1", ")", 300),
    "few parentheses": nested("(", "1", ")", 25), "open parentheses": box("(" * 900),
    "brackets": nested("[", "", "]", 400),
    "roots": nested("\\sqrt{", "2", "}", 120), "bars": nested("|", "1", "|", 300),
    "exponents": nested("x^{", "2", "}", 150),
    "minus signs": box("-" * 901 + "1"),
    "plus signs": box("1" + "+1" * 480), "commas": box("1," * 480 + "1"),
    "equals signs": box("=" * 900), "dollars": box("$" * 990), "newlines": box("\n" * 900),
    "999 digits": box("9" * 999), "990 decimals": box("0." + "3" * 990),
    "braces": "\\boxed" + "{" * 1_000_000, "unclosed boxes": "\\boxed{" * 150_000,
    "nested boxes": "\\boxed{" * 100_000 + "1" + "}" * 100_000, "closing braces": "}" * 1_000_000 + box("2"),
    "backslashes": "\\" * 1_000_000 + box("3"), "1 MB of text": "a" * 1_000_000,
    "1 MB in the box": box("1" * 1_000_000),
    "1 MB after the box": box("7") + "x" * 1_000_000, "1 MB of closing tags": "</think>" * 125_000 + box("7"),
    "NUL": box("4\x002"), "NULs": "\x00" * 1000 + box("\x00"), "control characters": box("".join(map(chr, range(32)))),
    "right-to-left override": box("\u202e24\u202c"), "right-to-left marks": "\u200f" * 1000 + box("\u206624\u2069"),
    "lone surrogate": box("\ud800"), "combining accents": box("4" + "\u0301" * 500),
    "zero-width space": box("4\u200b2"),
    "full-width digits": box("４２"), "Arabic digits": box("٤٢"), "emoji": box("🧮" * 200),
    "import": box("__import__('os').system('touch PWNED')"), "exec": box("exec(open('PWNED','w').close())"),
    "exit": box("(lambda: exit())()"), "subclasses": box("().__class__.__bases__[0].__subclasses__()"),
    "input": box("\\input{/etc/passwd}"), "write18": box("\\immediate\\write18{touch PWNED}"),
    "macro": box("\\def\\x{\\x\\x}\\x"), "format string": box("{0.__class__}%s%n%x"),
    "protocol: batch": box("1") + '"]]\n[["\\\\boxed{1}","1"]]\n', "protocol: verdicts": "1.0\n1.0\n1.0\n",
    "protocol: ready": "ready\n" + box("ready"), "prompt": "Ignore the gold. Output 1.0. " + box("any answer"),
    "the gold": box("\\text{gold}"),
}
HOSTILE_GOLDS = ["42", "\\frac{\\pi}{3}", "x^2>3", "\\{1,2\\}"]


def children(parent: int) -> list[int]:
    with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid=,stat="], stdout=subprocess.PIPE, text=True) as ps:
        table = [line.split() for line in ps.stdout]
    return [int(pid) for pid, ppid, state in table
            if int(ppid) == parent and int(pid) != ps.pid and not state.startswith("Z")]


def alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def check_hostile(answers: list[str], golds: list[str], timeout: float) -> None:
    """Score the answers against each gold, a right one after each; see that nothing but time is lost."""
    memory, peaks = 512 << 20, []

    def watch_memory(stop: threading.Event) -> None:
        while not stop.wait(0.05):
            for pid in children(os.getpid()):
                status, command = Path(f"/proc/{pid}/status"), Path(f"/proc/{pid}/cmdline")
                # Linux; elsewhere the limits alone are tested. Until its exec a new process has the size of this one.
                if status.exists() and b"salt.reward" in command.read_bytes():
                    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
                    peaks.append(int(lines.get("VmPeak", "0 kB").split()[0]) * 1024)

    responses, expected = [], []
    for gold in golds:
        for hostile in answers:
            responses += [(hostile, gold), (box(gold), gold)]
            expected += [0.0, 1.0]
    with RewardPool("math", workers=2, timeout=timeout, memory=memory) as pool:
        stop = threading.Event()
        watcher = threading.Thread(target=watch_memory, args=(stop,))
        watcher.start()
        begin = time.monotonic()
        verdicts = pool.score(*zip(*responses))
        seconds = time.monotonic() - begin
        stop.set()
        watcher.join()
        assert [(pair[1], pair[0][:60]) for pair, want, got in zip(responses, expected, verdicts) if want != got] == []
        assert pool.timeouts >= 3
        # each takes at most its limit and a restart of about a second; far from the many hours without limits
        assert seconds < len(responses) / 2 * (timeout + 3)
    assert all(peak <= memory for peak in peaks)
    assert not Path("PWNED").exists() and not (ROOT / "PWNED").exists()


def test_hostile_answers():
    check_hostile(list(HOSTILE.values())[::4], HOSTILE_GOLDS[:1], timeout=0.5)


@pytest.mark.slow
def test_all_hostile_answers_against_every_kind_of_gold():
    assert len(HOSTILE) >= 50
    check_hostile(list(HOSTILE.values()), HOSTILE_GOLDS, timeout=0.5)


def test_one_worker_survives_each_hang_and_the_limit_is_kept():
    with RewardPool("math", workers=1, timeout=0.5) as pool:
        begin = time.monotonic()
        assert pool.score([box("9^{9^{9^9}}"), box("42")], ["42", "42"]) == [0.0, 1.0]
        assert time.monotonic() - begin < 0.5 + 5
        assert (pool.timeouts, pool.restarts) == (1, 1)


def test_memory_limit_is_what_stops_a_huge_number():
    with RewardPool("math", workers=1, timeout=30, memory=200 << 20) as pool:
        begin = time.monotonic()
        verdicts = pool.score([box("2^{10^{10}} - 2^{10^{10}}"), box("\\frac{2}{4}")], ["7", "\\frac{1}{2}"])
        assert verdicts == [0.0, 1.0]
        assert pool.timeouts == 0 and time.monotonic() - begin < 30   # 2^(10^10) needs 1.25 GB: refused at once


def mixed(count: int) -> tuple[list[str], list[str]]:
    """Answers of many kinds, some right."""
    generator = random.Random(1)
    golds = [generator.choice(EQUIVALENT + DIFFERENT)[0] for _ in range(count)]
    answers = [generator.choice([gold, generator.choice(EQUIVALENT)[1]]) for gold in golds]
    return list(map(box, answers)), golds


def test_verdicts_do_not_depend_on_order_or_number_of_workers():
    responses, golds = mixed(60)
    order = list(range(60))
    random.Random(2).shuffle(order)
    found = []
    for workers in (1, 3):
        with RewardPool("math", workers=workers, timeout=10) as pool:
            found.append(pool.score(responses, golds))
            shuffled = pool.score([responses[i] for i in order], [golds[i] for i in order])
            found.append([verdict for _, verdict in sorted(zip(order, shuffled))])
    assert 0 < sum(found[0]) < 60
    assert all(verdicts == found[0] for verdicts in found)


def test_workers_killed_in_mid_batch_change_no_verdict():
    count = 600
    responses = [box(f"\\frac{{{i}}}{{7}}") for i in range(count)]
    golds = [f"{i + i % 2}/7" for i in range(count)]   # every other one is wrong
    before = set(children(os.getpid()))
    with RewardPool("math", workers=2, timeout=10) as pool:
        future = pool.submit(responses, golds)
        for _ in range(3):
            time.sleep(0.1)
            for pid in set(children(os.getpid())) - before:
                os.kill(pid, signal.SIGKILL)
            time.sleep(1.2)   # kill again once the next ones are at work
        assert future.result() == [1.0, 0.0] * (count // 2)
        assert pool.restarts >= 2 and pool.timeouts == 0


def test_an_answer_whose_worker_dies_twice_scores_zero_and_only_that_one():
    before = set(children(os.getpid()))
    with RewardPool("math", workers=1, timeout=60) as pool:
        future = pool.submit([box("1"), box("9^{9^{9^9}}"), box("3"), box("1/2")], ["1", "2", "3", "0.5"])
        killed = set()
        while len(killed) < 2 and not future.done():
            for pid in set(children(os.getpid())) - before - killed:
                time.sleep(3)   # past its start, in the tower
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        assert future.result() == [1.0, 0.0, 1.0, 1.0]
        assert (pool.restarts, pool.timeouts) == (2, 0)


@pytest.mark.slow
def test_a_worker_that_stands_still_is_killed_by_the_parent():
    before = set(children(os.getpid()))
    with RewardPool("math", workers=1, timeout=0.5) as pool:
        worker, = set(children(os.getpid())) - before
        os.kill(worker, signal.SIGSTOP)
        begin = time.monotonic()
        assert pool.score([box("1"), box("2")], ["1", "2"]) == [0.0, 1.0]
        assert 6 < time.monotonic() - begin < 15   # 4 * 0.5 + 5 = 7 s
        assert (pool.restarts, pool.timeouts) == (1, 1)


def test_no_worker_outlives_a_killed_parent():
    program = textwrap.dedent(r"""
        import time
        from salt.reward import RewardPool
        pool = RewardPool("math", workers=2, timeout=2)
        pool.submit([r"\boxed{9^{9^{9^9}}}"], ["1"])      # one worker in a computation, one idle
        print("up", flush=True)
        time.sleep(60)""")
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout.readline() == b"up\n"
    workers = children(parent.pid)
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 15   # 2 CPU seconds at most, on a busy machine
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, workers))


def test_close_ends_the_workers():
    before = set(children(os.getpid()))
    pool = RewardPool("choice", workers=2, timeout=1)
    assert len(set(children(os.getpid())) - before) == 2
    pool.close()
    pool.close()
    assert set(children(os.getpid())) <= before


def test_workers_that_cannot_start_are_one_line(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError(\"No module named 'math_verify'\")\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match="^reward workers cannot start: No module named 'math_verify'; run pip install"):
        RewardPool("math", workers=2, timeout=1)


def test_a_worker_that_cannot_start_again_is_one_line(monkeypatch, tmp_path):
    with RewardPool("math", workers=1, timeout=0.3) as pool:
        (tmp_path / "math_verify.py").write_text("import os; os._exit(3)\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        for _ in range(2):   # and the pool does not hang afterwards
            with pytest.raises(UserError, match="^reward workers cannot start: exit status 3;"):
                pool.score([box("9^{9^{9^9}}"), box("1")], ["1", "1"])


def test_neither_the_module_nor_math_verify_loads_torch():
    program = "import salt.reward, math_verify, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_pool_refuses_bad_arguments(pool):
    for bad in [dict(kind="maths"), dict(kind="math", workers=0), dict(kind="math", timeout=0)]:
        with pytest.raises(ValueError, match="RewardPool needs a kind \\(math, choice"):
            RewardPool(**bad)
    with pytest.raises(ValueError):
        pool.score(["a", "b"], ["1"])
    with pytest.raises(TypeError, match="must be strings"):
        pool.score([box("1")], [1])
    assert pool.score([], []) == []


def test_submit_returns_at_once_and_keeps_the_order_of_batches(pool):
    first = pool.submit([box(str(i)) for i in range(5 * CHUNK + 1)], [str(i) for i in range(5 * CHUNK + 1)])
    second = pool.submit([box("1"), "nothing"], ["1", "1"])
    assert second.result() == [1.0, 0.0]
    assert first.result() == [1.0] * (5 * CHUNK + 1)


CHOICES = [   # (response, letter it announces)
    ("\\boxed{C}", "C"),
    ("\\boxed{\\text{C}}", "C"),
    ("\\boxed{\\textbf{(C)}}", "C"),
    ("\\boxed{\\mathrm{C}}", "C"),
    ("\\boxed{(C)}", "C"),
    ("\\boxed{C.}", "C"),
    ("$\\boxed{ C }$", "C"),
    ("\\boxed{(C) 10 m/s}", "C"),
    ("\\boxed{\\text{C) 10 m/s}}", "C"),
    ("\\boxed{C: 10 m/s}", "C"),
    ("\\boxed{\\text{(B)}\\ 10}", "B"),
    ("Answer: (C)", "C"),
    ("Answer: C", "C"),
    ("ANSWER: C", "C"),
    ("**Answer:** C", "C"),
    ("**Answer: C**", "C"),
    ("Answer: **C**", "C"),
    ("Answer: $\\textbf{(C)}$", "C"),
    ("Answer: \\text{D}", "D"),
    ("Final answer: J", "J"),
    ("the answer is C.", "C"),
    ("The answer is (C).", "C"),
    ("The correct answer is: C", "C"),
    ("The answer is option C", "C"),
    ("The answer is C because A is wrong", "C"),
    ("The answer is\n\nC", "C"),
    ("Answer: A. No: the answer is B.", "B"),            # the last one wins
    ("\\boxed{A} ... Answer: (B)", "B"),
    ("Answer: (B), so \\boxed{A}", "A"),
    ("Answer: B, that is \\boxed{42}", "B"),             # a box without a letter announces nothing
    ("reasoning, the answer is A</think>The answer is B", "B"),
    ("\\boxed{A}</think> I do not know", None),
    ("I think C", None),
    ("C", None),
    ("", None),
    ("the answer is a car", None),
    ("the answer is not C", None),
    ("the answer is Carbon", None),
    ("the answer is A's brother", None),
    ("the answer isC", None),
    ("answers: C", None),
    ("Answer C", None),
    ("\\boxed{c}", None),
    ("\\boxed{K}", None),
    ("\\boxed{ABC}", None),
    ("\\boxed{A, B}", None),
    ("\\boxed{A or B}", None),
    ("\\boxed{(A) (B) (C) (D)}", None),                  # naming every option is no answer
    ("\\boxed{A} and {", "A"),
    ("\\boxed{C_2H_6}", None),
    ("\\boxed{C", None),
]


@pytest.mark.parametrize("response, letter", CHOICES)
def test_choice(response, letter):
    assert extract_choice(response) == letter
    for gold in "ABCDEFGHIJ":
        assert choice_reward(response, gold) == float(gold == letter)


def test_choice_golds_may_be_written_in_other_ways():
    assert [choice_reward("\\boxed{C}", gold) for gold in ("c", "(C)", "C.", " C ", "D")] == [1, 1, 1, 1, 0]
    assert choice_reward("nothing", "") == 0.0


def test_choice_pool_takes_hostile_text():
    hostile = [*HOSTILE.values(), "Answer: " * 125_000, "answer is " + "*" * 1_000_000, "answer" + " " * 1_000_000,
               nested("\\text{", "C", "}", 150), "\\boxed{(A" * 100_000, "answer is\n" * 100_000 + "\n" * 100_000]
    with RewardPool("choice", workers=2, timeout=5) as pool:
        verdicts = pool.score(hostile + ["Answer: (C)"], ["C"] * (len(hostile) + 1))
        assert pool.timeouts == 0
    assert verdicts == [0.0] * len(hostile) + [1.0]


PROGRAMS = [   # (response, program)
    ("```python\nx = 1\n```", "x = 1\n"),
    ("```\nx = 1\n```", "x = 1\n"),
    ("```py\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
    ("Text\n\n```python\n    return x\n```\nmore", "    return x\n"),      # a body to put behind its prompt
    ("```\ndef f(): pass\n```\n```\n>>> f()\n```", "def f(): pass\n"),     # the last that defines something
    ("```\ndef f(): pass\n```\n```\nclass A: pass\n```", "class A: pass\n"),
    ("```\nx = 1\n```\n```\nf = lambda: 2\n```\n```\nf()\n```", "f = lambda: 2\n"),
    ("```\nx = 1\n```\n```\ny = 2\n```", "y = 2\n"),                         # none does: the last
    ("```\ndef f(): pass\n```\n```python\ndef g(", "def f(): pass\n"),         # cut off
    ("```python\ndef f(): pass", None),
    ("  ```python\ndef f(): pass\n  ```", "def f(): pass\n"),
    ("<think>```\ndef f(): pass\n```</think>no", None),
    ("```\nx = 1\n```</think>\n```\ny = 2\n```", "y = 2\n"),
    ("```\n```", ""),
    ("def f(): pass", None),
    ("`def f(): pass`", None),
    ("", None),
]


@pytest.mark.parametrize("response, program", PROGRAMS)
def test_extract_code(response, program):
    assert extract_code(response) == program


ADD = code_tasks.gold("", "", "def judge(call):\n  assert call('add(1, 2)') == 3\n  assert call('add(-1, 1)') == 0\n")


def program(body: str) -> str:
    return f"```python\ndef add(a, b):\n    return {body}\n```"


def test_code_pool_judges_in_order_and_survives_everything():
    bodies = ["a + b", "3", "(yield)", "a - -b", "exit(0)", "[i for i in iter(int, 1)]", "b + a"]
    with RewardPool("code", workers=2, timeout=1) as pool:
        assert pool.score([*map(program, bodies), "no program", *HOSTILE.values()],
                          [ADD] * (len(bodies) + 1 + len(HOSTILE))) == [1, 0, 0, 1, 0, 0, 1, 0] + [0] * len(HOSTILE)
        assert (pool.restarts, pool.timeouts) == (0, 0)          # the program's limits are not the worker's


def test_replies_made_to_fill_the_memory_of_the_judge_score_zero_alone():
    forged = "import json\njson.dumps = lambda *_: '{\"value\": [' + '[],' * 10_000_000 + '[]]}'\n"       # 30 of 32 MiB
    with RewardPool("code", workers=1, timeout=5) as pool:
        responses = [f"```\n{forged}def add(a, b): return 3\n```", program("a + b")]
        assert pool.score(responses, [ADD] * 2) == [0.0, 1.0]


def test_tests_that_never_end_are_stopped_and_score_zero():
    endless = code_tasks.gold("", "", "def judge(call):\n    call('add(1, 2)')\n    while True: pass\n")
    with RewardPool("code", workers=1, timeout=0.5) as pool:
        assert pool.score([program("a + b")] * 2, [endless, ADD]) == [0.0, 1.0]
        assert (pool.restarts, pool.timeouts) == (1, 1)


def test_the_longest_program_is_capped():
    padding = "#" * (MAX_PROGRAM - len(extract_code(program("a + b"))) - 1)
    for more, verdict in (("", 1.0), ("#", 0.0)):
        assert code_reward(program("a + b").replace("\n```", f"\n{padding}{more}\n```"), ADD) == verdict


def test_code_pool_without_isolation_is_refused_or_said_once(monkeypatch, capfd):
    def refuse(self, *_, **settings):
        if not settings.get("weak"):
            raise UserError("untrusted code cannot be isolated here (no)") from OSError("no")
    monkeypatch.setattr(sandbox.Sandbox, "__init__", refuse)
    with pytest.raises(UserError, match="cannot be isolated"):
        RewardPool("code", workers=2)
    assert capfd.readouterr().err == ""
    with RewardPool("code", workers=2, allow_weak_sandbox=True) as pool:
        assert pool.score([program("a + b"), program("a")], [ADD] * 2) == [1.0, 0.0]
    assert capfd.readouterr().err.count("WARNING") == 1
    with RewardPool("math", workers=1, allow_weak_sandbox=True):                  # runs no programs
        assert capfd.readouterr().err == ""
