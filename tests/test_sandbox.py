"""Programs that cheat, attack or never end; what a program can see and do; honest programs beside them."""
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from salt import sandbox
from salt.code_tasks import gold
from salt.errors import UserError
from salt.reward import code_reward
from salt.sandbox import ProgramError, Sandbox, must_be_weak, wall_limit

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 1.03125            # no other process has this in its command line, so ours can be told by it
PWNED = "salt-sandbox-was-here"
SQUARE = gold("", "", textwrap.dedent("""
    def judge(call):
        assert call("f(2)") == 4          # a prompt would show this one
        for n in (3, -5, 10):
            assert call(f"f({n})") == n * n"""))

# A right program would pass, so whoever scores 1 here has cheated. `4` is the value that a prompt gives away.
CHEATS = {
    "the shown test only": "def f(n): return 4",
    "sys.exit(0)": "import sys; sys.exit(0)",
    "os._exit(0)": "import os; os._exit(0)",
    "exit in the function": "def f(n): raise SystemExit(0)",
    "os._exit in the function": "import os\ndef f(n): os._exit(0)",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(n): exit(0)",
    "excepthook": "import sys, os\nsys.excepthook = lambda *_: os._exit(0)\ndef f(n): raise ValueError",
    "BaseException": "class E(BaseException): pass\ndef f(n): raise E",
    "printed success": "print('1.0\\nready\\nPASSED')\ndef f(n): print('1.0'); return 4",
    "equal to everything": "class E:\n  __eq__ = lambda *_: True\n  __ne__ = lambda *_: False\ndef f(n): return E()",
    "int equal to everything": "class E(int):\n  __eq__ = lambda *_: True\n  __hash__ = None\ndef f(n): return E(4)",
    "says it is an int": "class E:\n  __class__ = int\n  __eq__ = lambda *_: True\n  __index__ = lambda s: 4\n"
                         "def f(n): return E()",
    "lying metaclass": "class M(type):\n  __instancecheck__ = __subclasscheck__ = lambda *_: True\n"
                       "class E(metaclass=M):\n  __eq__ = lambda *_: True\ndef f(n): return E()",
    "float equal to everything": "class E(float):\n  __eq__ = lambda *_: True\n  __repr__ = lambda s: '4'\n"
                                 "def f(n): return E('nan')",
    "mock": "from unittest.mock import ANY\ndef f(n): return ANY",
    "nan": "def f(n): return float('nan')",
    "no function": "x = 1",
    "empty": "",
    "syntax error": "def f(n) return 4",
    "NUL byte": "def f(n): return 4\x00",
    "fake eval": "import builtins\nbuiltins.eval = lambda *_: 4",
    "fake assert": "import builtins\nclass A(Exception): __new__ = lambda *_: None\nbuiltins.AssertionError = A\n"
                   "def f(n): return 4",
    "fake isinstance, len and all": "import builtins\nbuiltins.isinstance = builtins.all = lambda *_: True\n"
                                    "def f(n): return object()",
    "fake json": "import json\njson.dumps = lambda *_: '{\"value\": {\"any\": []}}'\ndef f(n): return 4",
    "fake plain": "import sys\nsys.modules['__main__'].plain = lambda value: 4\ndef f(n): return None",
    "forged replies": "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'{\"value\": 4}\\n' * 100)\n"
                      "  except OSError: pass\ndef f(n): return 4",
    "forged verdicts": "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'1.0\\n' * 100)\n"
                       "  except OSError: pass",
    "forged tag": "import sys\nsys.modules['__main__'].plain = lambda v: {'eval': '__import__(\"os\").abort()'}\n"
                  "def f(n): return 4",
    "forged depth": "import json\njson.dumps = lambda *_: '[' * 10**6\ndef f(n): return 4",
    "frame walking": """
        import sys
        def f(n):
            frame = sys._getframe()
            while frame:
                for name, value in list(frame.f_locals.items()) + list(frame.f_globals.items()):
                    if 'expect' in name or 'gold' in name or 'judge' in name:
                        return value
                frame = frame.f_back
            return 4""",
    "garbage collector": """
        import gc, re
        def f(n):
            for thing in gc.get_objects():
                if isinstance(thing, (str, dict, list)) and 'n * n' in str(thing)[:10000] and 'judge' in str(thing):
                    return n * n
            return 4""",
    "reading the tests": """
        import os, re
        def f(n):
            for folder, _, files in os.walk('/'):
                for name in files:
                    if name.endswith(('.jsonl', '.jsonl.gz', '.parquet', 'code_tasks.py')):
                        return n * n
            return 4""",
    "memory of the parent": """
        import os
        def f(n):
            for pid in (os.getppid(), 1, 'self', 'thread-self'):
                for name in ('environ', 'cmdline', 'mem', 'maps'):
                    if os.path.exists(f'/proc/{pid}/{name}'): return n * n
            return 4""",
    "tracing": "import sys\ndef t(frame, event, arg):\n  frame.f_locals['value'] = 4\n  return t\nsys.settrace(t)\n"
               "def f(n): return 4",
    "import hook": "import sys, builtins\nbuiltins.__import__ = lambda *a, **k: sys\ndef f(n): return 4",
    "swallows what it asked for": "import os\ndef f(n):\n  for fd in range(3, 64):\n    try: os.read(fd, 1)\n"
                                  "    except OSError: pass\n  return 4",
}
HOSTILE = {
    "endless import": "while True: pass",
    "endless function": "def f(n):\n  while True: pass",
    "sleep": "import time\ndef f(n): time.sleep(1e6)",
    "swallows KeyboardInterrupt": "def f(n):\n  while True:\n    try:\n      while True: pass\n"
                                  "    except BaseException: pass",
    "ignores signals": "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"
                       "def f(n):\n  while True: pass",
    "alarm that starts over": "import signal\ndef f(*_):\n  signal.signal(signal.SIGALRM, f)\n  signal.alarm(1)\n"
                              "  while True: pass",
    "kills its parent": "import os, signal\nfor pid in (os.getppid(), 1, 0, -1):\n"
                        "  try: os.kill(pid, signal.SIGKILL)\n  except OSError: pass\ndef f(n): return 4",
    "stops everybody": "import os, signal\nfor pid in (os.getppid(), 1, -1):\n"
                       "  try: os.kill(pid, signal.SIGSTOP)\n  except OSError: pass\ndef f(n): return 4",
    "threads": "import threading, time\nfor _ in range(20): threading.Thread(target=time.sleep, args=(1e6,)).start()\n"
               "def f(n): return 4",
    "busy threads": "import threading\ndef g():\n  while True: pass\n"
                    "for _ in range(20): threading.Thread(target=g).start()\ndef f(n): return 4",
    "fork bomb": "import os\ndef f(n):\n  while True:\n    try: os.fork()\n    except OSError: pass",
    "daemon": "import os, time\ndef f(n):\n  if not os.fork():\n    os.setsid()\n    os.fork() or time.sleep(1e6)\n"
              "    os._exit(0)\n  return 4",
    "daemon in place of the program": "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(1e6)",
    "zombie children": "import os\ndef f(n):\n  for _ in range(30):\n    if not os.fork(): os._exit(0)\n  return 4",
    "clears its death signal": "import ctypes, os, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nos.setsid()\n"
                               "for fd in range(64):\n  try: os.close(fd)\n  except OSError: pass\ntime.sleep(1e6)",
    "another program": f"import os\nos.execv('/usr/bin/sleep', ['sleep', '{SECONDS}e6'])",
    "another program beside it": f"import subprocess\nsubprocess.Popen(['/usr/bin/sleep', '{SECONDS}e6'],"
                                 " start_new_session=True)\ndef f(n): return 4",
    "multiprocessing": "import multiprocessing, time\nmultiprocessing.set_start_method('fork')\n"
                       "p = multiprocessing.Process(target=time.sleep, args=(1e6,))\np.start()\ndef f(n): p.join()",
    "memory bomb": "def f(n): return len(bytearray(1 << 40))",
    "memory, little by little": "def f(n):\n  x = []\n  while True: x.append(bytearray(1 << 20))",
    "memory in many processes": "import os\ndef f(n):\n  for _ in range(6): os.fork()\n  x = []\n"
                                "  while True: x.append(bytearray(1 << 20))",
    "endless output": "def f(n):\n  while True: print('x' * 65536)",
    "endless reply": "import os\ndef f(n):\n  while True:\n    for fd in range(3, 9):\n"
                     "      try: os.write(fd, b'x' * 65536)\n      except OSError: pass",
    "huge string": "def f(n): return 'x' * (1 << 28)",
    "huge list": "def f(n): return [0] * (1 << 25)",
    "huge number": "def f(n): return 1 << (1 << 30)",
    "number of a million digits": "def f(n): return 1 << 3_300_000",
    "recursion": "def f(n): return f(n)",
    "recursion without limit": "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n)",
    "deep list": "def f(n):\n  x = []\n  for _ in range(10**5): x = [x]\n  return x",
    "list in itself": "def f(n):\n  x = []\n  x.append(x)\n  return x",
    "endless iterator": "import itertools\ndef f(n): return itertools.count()",
    "endless dict": "class D(dict):\n  def items(self):\n    while True: yield 1, 1\ndef f(n): return D()",
    "segmentation fault": "import ctypes\ndef f(n): return ctypes.string_at(0)",
    "abort": "import os\ndef f(n): os.abort()",
    "closes its pipes": "import os\nos.closerange(0, 64)\ndef f(n): return 4",
    "never reads": "import time, os\nos.set_blocking(3, False)\ntime.sleep(1e6)",
    "writes outside": f"""
        import os, pathlib
        for folder in ('/', '/usr', '/root', '/home', '/var/tmp', '/dev/shm', '/etc', '/proc', {str(ROOT)!r}, '..'):
            try: pathlib.Path(folder, {PWNED!r}).write_text('x')
            except OSError: pass
        def f(n): return 4""",
    "writes into Python": f"""
        import os, sys
        for folder in {{sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), '/usr/lib', '/lib'}}:
            try: open(os.path.join(folder, {PWNED!r}), 'w').close()
            except OSError: pass
        def f(n): return 4""",
    "temporary files": "import tempfile\nkept = [tempfile.mkstemp() for _ in range(20)]\ndef f(n): return 4",
    "fills the disk": "def f(n):\n  for i in range(1000):\n    with open(f'x{i}', 'wb') as x: x.write(bytes(10**7))",
    "removes everything": "import shutil\nshutil.rmtree('/', ignore_errors=True)\ndef f(n): return 4",
    "remounts": """
        import ctypes
        libc = ctypes.CDLL(None)
        for flags in (4096 | 32, 1 << 18): libc.mount(None, b'/usr', None, flags, None)
        libc.umount2(b'/usr', 2)
        def f(n): return n * n if open('/usr/pwned', 'w') else 4""",
    "new privileges": """
        import ctypes, os
        def f(n):
            if ctypes.CDLL(None).unshare(0x10000000) == 0: return n * n
            try: os.setuid(0)
            except OSError: return 4
            return n * n if os.getuid() == 0 else 4""",
    "leaves its root directory": """
        import os
        def f(n):
            try:
                os.mkdir('x'); os.chroot('x'); os.chdir('../' * 20)
            except OSError:
                return 4
            return n * n""",
    "traces init": "import ctypes\ndef f(n): return n * n if ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0 else 4",
    "network": """
        import socket
        def f(n):
            for address in (('1.1.1.1', 53), ('127.0.0.1', 22), ('127.0.0.1', 80)):
                try:
                    socket.create_connection(address, timeout=1)
                    return n * n
                except ConnectionRefusedError:
                    return n * n       # somebody was there to refuse
                except OSError: pass
            return 4""",
    "shared memory": "import ctypes\nctypes.CDLL(None).shmget(1, 4096, 0o1600)\ndef f(n): return 4",
}
HONEST = {
    "plain": "def f(n): return n * n",
    "prints": "print('x' * 10**6)\ndef f(n):\n  print(n)\n  return n ** 2",
    "reads standard input": "import sys\nassert sys.stdin.read() == ''\ndef f(n): return n * n",
    "a main guard": "def f(n): return n * n\nif __name__ == '__main__': raise SystemExit",
    "threads and files": """
        import tempfile, threading
        def f(n):
            out = []
            thread = threading.Thread(target=lambda: out.append(n * n)); thread.start(); thread.join()
            with tempfile.TemporaryFile('w+') as file:
                file.write(str(out[0])); file.seek(0)
                return int(file.read())""",
    "much of the library": "import collections, dataclasses, datetime, decimal, functools, hashlib, heapq, itertools, "
                           "math, random, re, sqlite3, ssl, statistics, typing\n"
                           "@dataclasses.dataclass\nclass P:\n  x: 'int'\ndef f(n): return int(math.pow(P(n).x, 2))",
}


def answer(program: str) -> str:
    return f"Like this:\n```python\n{textwrap.dedent(program)}\n```\n"


def ours() -> list[int]:
    """Processes that a sandbox of these tests has started and that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and str(SECONDS).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:      # it has just ended
            pass
    return found


def judged(program: str, **settings) -> tuple[float, float]:
    began = time.monotonic()
    verdict = code_reward(answer(program), SQUARE, seconds=SECONDS, **settings)
    return verdict, time.monotonic() - began


def check(programs: dict[str, str], expected: float, threads: int = 6, **settings) -> None:
    with ThreadPoolExecutor(threads) as pool:
        results = dict(zip(programs, pool.map(lambda program: judged(program, **settings), programs.values())))
    assert {name: verdict for name, (verdict, _) in results.items() if verdict != expected} == {}
    late = {name: seconds for name, (_, seconds) in results.items() if seconds > wall_limit(SECONDS) + 2}
    assert late == {}
    assert ours() == []
    places = [Path.cwd(), ROOT, Path.home(), *map(Path, ("/", "/tmp", "/var/tmp", "/usr", "/usr/lib", "/dev/shm"))]
    assert [place for place in places if (place / PWNED).exists()] == []


def test_there_are_enough_of_them():
    assert len(CHEATS) + len(HOSTILE) >= 40


def test_cheats_score_zero_and_leave_nothing():
    check(CHEATS, 0.0)


@pytest.mark.slow
def test_hostile_programs_score_zero_and_leave_nothing():
    check(HOSTILE, 0.0)


@pytest.mark.slow
def test_ending_a_sandbox_never_takes_force():
    """A signal that comes while the outer process is about to wait must not be lost: it was, one time in a thousand."""
    def ended(_) -> int:
        with Sandbox(seconds=SECONDS) as box:
            pass                       # closed as soon as it is ready, before the outer process waits
        return box.process.returncode

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(ended, range(1000))) == {0}       # -9 where `close` had to kill it
    assert ours() == []


def test_honest_programs_score_one():
    check(HONEST, 1.0, threads=2)


# ------------------------------------------------------------------------------------------------------ from the inside


@pytest.fixture(scope="module")
def inside():
    """A sandbox in which `os` and `sys` are imported, for looking around."""
    with Sandbox(seconds=1.5) as sandbox:
        sandbox.run("import os, sys, ctypes, socket, resource")
        yield sandbox


def test_only_python_and_an_empty_folder_are_in_sight(inside):
    top = set(inside.call("os.listdir('/')"))
    assert top <= {"usr", "lib", "lib64", "tmp", Path(sys.base_prefix).parts[1]}
    assert inside.call("(os.getcwd(), os.listdir('.'))") == ("/tmp", [])
    assert inside.call("os.statvfs('/tmp').f_frsize * os.statvfs('/tmp').f_blocks") == 16 << 20
    packages = list(Path(os.__file__).parents[1].glob("python3*/*-packages"))
    assert packages and all(inside.call(f"os.listdir({str(folder)!r})") == [] for folder in packages)
    for path in (ROOT, Path.home() / ".ssh", "/etc/passwd", "/proc/self", "/dev/null", "/sys"):
        assert not inside.call(f"os.path.exists({str(path)!r})")


def test_it_is_nobody_alone_and_has_no_privileges(inside):
    assert inside.call("(os.getpid(), os.getppid())") == (2, 1)
    if os.geteuid() == 0:
        assert min(inside.call("os.getresuid() + os.getresgid()")) >= 1 << 30
        assert inside.call("os.getgroups()") == []
    inside.run("header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()\n"
               "assert ctypes.CDLL(None).capget(header, sets) == 0")
    assert inside.call("list(sets)") == [0] * 6
    assert inside.call("ctypes.CDLL(None).prctl(39, 0, 0, 0, 0)") == 1          # PR_GET_NO_NEW_PRIVS
    assert inside.call("socket.if_nameindex()") == [(1, "lo")]
    assert inside.call("dict(os.environ)").keys() <= {"PYTHONHASHSEED", "LC_CTYPE"}


def test_limits(inside):
    found = {name: tuple(inside.call(f"resource.getrlimit(resource.RLIMIT_{name})"))
             for name in ("CPU", "AS", "FSIZE", "NOFILE", "NPROC", "CORE")}
    assert found == {"CPU": (2, 2), "AS": (1 << 30,) * 2, "FSIZE": (16 << 20,) * 2, "NOFILE": (64, 64),
                     "NPROC": (64, 64), "CORE": (0, 0)}


VALUES = ["None", "True", "-7", "1 << 200", "-3 ** 20_000", "0.1", "inf", "'a\\x00\\ud800é'",
          "1+2j", "[]", "(1, [2, (3,)])", "{1, 2}",
          "frozenset({'a'})", "{1: {'a': (None,)}, (1, 2): set()}"]


@pytest.mark.parametrize("source", VALUES)
def test_plain_values_arrive_as_they_are(inside, source):
    value = eval(source, {"inf": float("inf")})
    found = inside.call(source)
    assert found == value and type(found) is type(value)
    if value != -3 ** 20_000:
        assert inside.call(f"(lambda x: x)(*{(value,)!r})") == value             # and go there as `repr` writes them


def test_subclasses_arrive_as_what_they_are_based_on(inside):
    inside.run("import collections, enum", "class E(enum.IntEnum):\n  A = 3")
    for source, value in [("collections.Counter('aab')", {"a": 2, "b": 1}), ("collections.OrderedDict(a=1)", {"a": 1}),
                          ("collections.namedtuple('P', 'x y')(1, 2)", (1, 2)), ("E.A", 3)]:
        found = inside.call(source)
        assert found == value and type(found) is type(value)


@pytest.mark.parametrize("source", ["object()", "lambda: 1", "iter([])", "range(3)", "b'a'", "...", "{1: object()}"])
def test_other_values_do_not(inside, source):
    with pytest.raises(ProgramError, match="TypeError"):
        inside.call(source)


def test_the_order_of_sets_is_the_same_every_time():
    orders = set()
    for _ in range(3):
        with Sandbox(seconds=SECONDS) as box:
            orders.add(tuple(box.call("list({'red', 'green', 'blue', 'violet', 'black'})")))
    assert len(orders) == 1


def test_a_failed_request_is_remembered_even_if_a_test_swallows_it():
    forgiving = gold("", "", "def judge(call):\n  try: call('f(1)')\n  except Exception: pass")
    assert code_reward(answer("def f(n): return 1"), forgiving, seconds=SECONDS) == 1.0
    assert code_reward(answer("def f(n): raise ValueError"), forgiving, seconds=SECONDS) == 0.0


def test_asserts_count_even_where_python_is_told_to_skip_them():
    code = (f"from salt.reward import code_reward; print(code_reward({answer('def f(n): return 4')!r}, {SQUARE!r}), "
            f"code_reward({answer('def f(n): return n * n')!r}, {SQUARE!r}))")
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "0.0 1.0\n", done.stderr


def test_one_sandbox_does_not_use_up_anothers_processes():
    bomb = "import os, time\nfor _ in range(100):\n  try: os.fork() or time.sleep(1e6)\n  except OSError: break"
    with Sandbox(seconds=SECONDS) as first, Sandbox(seconds=SECONDS) as second:
        first.run(bomb)
        with pytest.raises(ProgramError, match="BlockingIOError"):
            first.call("os.fork()")
        second.run("import threading\nthread = threading.Thread(target=int)\nthread.start()")
    assert ours() == []


def test_nothing_outlives_a_killed_judge():
    program = ("import os, time\nfor _ in range(3): os.fork()\nos.setsid() if os.getsid(0) != os.getpid() else 0\n"
               "time.sleep(1e6)")
    code = f"from salt.reward import code_reward; code_reward({answer(program)!r}, {SQUARE!r}, seconds={SECONDS} * 40)"
    arguments = [sys.executable, "-c", code]
    parent = subprocess.Popen(arguments, cwd=ROOT)
    deadline = time.monotonic() + 20

    def sandboxed() -> list[str]:
        marker = f"sandbox_child.py\x00{SECONDS * 40}".encode()
        return [entry.name for entry in Path("/proc").glob("[0-9]*") if marker in read(entry / "cmdline")]

    def read(path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError:
            return b""

    while len(sandboxed()) < 10 and time.monotonic() < deadline:                 # outer, init and 8 of the program
        time.sleep(0.05)
    assert len(sandboxed()) == 10
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while sandboxed() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sandboxed() == []


# ------------------------------------------------------------------------------------------------------ weak isolation


BROKEN = textwrap.dedent("""
    import importlib.util, sys
    spec = importlib.util.spec_from_file_location("child", {child!r})
    child = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(child)
    def refuse():
        raise OSError(1, "unshare: Operation not permitted")
    child.enter_new_world = refuse
    child.main()""")


@pytest.fixture
def no_namespaces(tmp_path, monkeypatch):
    """A machine that refuses to make namespaces."""
    child = tmp_path / "sandbox_child.py"
    child.write_text(BROKEN.format(child=str(sandbox.CHILD)))
    monkeypatch.setattr(sandbox, "CHILD", child)


def test_where_it_cannot_be_isolated_nothing_runs_unless_allowed(no_namespaces, capfd):
    with pytest.raises(UserError, match=r"isolated here \(unshare: Operation not permitted\).*--allow-weak-sandbox"):
        code_reward(answer("def f(n): return n * n"), SQUARE, seconds=SECONDS)
    with pytest.raises(UserError):
        must_be_weak(False)
    assert capfd.readouterr().err == ""
    assert must_be_weak(True)
    err = capfd.readouterr().err
    assert err.startswith("WARNING: ") and "unshare: Operation not permitted" in err and err.count("\n") == 1
    assert code_reward(answer("def f(n): return n * n"), SQUARE, seconds=SECONDS, weak=True) == 1.0


def test_where_it_can_be_isolated_it_is_even_if_weak_is_allowed(capfd):
    assert must_be_weak(True) is False and capfd.readouterr().err == ""


def test_weak_isolation_keeps_its_limits_and_its_folder_tidy(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    chosen = ["sleep", "endless import", "temporary files", "memory bomb", "huge string", "threads", "zombie children"]
    check({name: HOSTILE[name] for name in chosen}, 0.0, weak=True)
    check({name: CHEATS[name] for name in list(CHEATS)[::3]}, 0.0, weak=True)
    check({"plain": HONEST["plain"]}, 1.0, weak=True)
    assert list(tmp_path.glob("tmp*/*")) == [] and not any(path.is_dir() for path in tmp_path.iterdir())


def test_a_reply_can_only_describe_plain_values():
    assert sandbox._built({"dict": [[{"tuple": [1]}, {"set": []}]]}) == {(1,): set()}
    for forged in ({"object": []}, {"list": 3}, {"dict": [[1]]}, {"set": [[1]]}, {"complex": ["a"]}, {"int": "x"}, {},
                   {"list": [], "set": []}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            sandbox._built(forged)
