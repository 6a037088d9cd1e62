"""The untrusted side of salt/sandbox.py: shuts itself in, then runs a program and evaluates expressions for the parent.

A program of its own that imports nothing of ours. Requests come in as lines of JSON and each gets one line back: a list
of sources is executed, a text is evaluated; the reply holds the value in plain types or the name of an exception. From
the first source on, nothing here can be trusted: the program may have replaced any of it.

Shut in, these processes form a chain, and the end of one is the end of those behind it:

    outer    in the parent's world, waits                       ended by SIGTERM, from the parent or from its death
    init     number 1 in the new world, runs our code only      its end is the end of every process in there
    program  anything

Departures from the paper: none (the paper does not say how code is judged).
"""
import ctypes
import glob
import json
import math
import os
import resource
import signal
import struct
import sys
import types

# from <sched.h>, <sys/mount.h>, <sys/prctl.h> and <linux/capability.h>
NEW_MOUNTS, NEW_HOST_NAME, NEW_IPC, NEW_USER, NEW_PROCESSES, NEW_NETWORK = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
READ_ONLY, NO_SETUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DEATH_SIGNAL, DUMPABLE, NO_NEW_PRIVILEGES, CAPABILITIES_3 = 1, 4, 38, 0x20080522

ROOT = "/proc"   # where the program's root directory is mounted: this folder is everywhere, and nothing of it is needed
LIMITS = {"AS": 1 << 30, "FSIZE": 16 << 20, "NOFILE": 64, "NPROC": 64, "CORE": 0}


def system(name: str, *arguments) -> None:
    """A call into the C library; OSError with its name if it fails."""
    texts = [os.fsencode(part) if isinstance(part, str) else part for part in arguments]
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*texts) == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def enter_new_world() -> None:
    """New namespaces, and a root directory that holds bare Python, read-only, and an empty /tmp of 16 MiB."""
    uid, gid, privileged = os.getuid(), os.getgid(), os.geteuid() == 0
    system("unshare", NEW_MOUNTS | NEW_HOST_NAME | NEW_IPC | NEW_PROCESSES | NEW_NETWORK | (not privileged) * NEW_USER)
    files = {"oom_score_adj": "1000"}   # when memory runs out, the kernel's choice falls on the program
    if not privileged:                  # whoever makes a user namespace has every privilege in it, and this one user
        files |= {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
    for name, text in files.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    os.umask(0o022)
    system("mount", None, "/", None, RECURSIVE | PRIVATE, None)
    system("mount", "tmpfs", ROOT, "tmpfs", NO_SETUID | NO_DEVICES, "size=16m,nr_inodes=4k,mode=755")
    for folder in filter(os.path.isdir, dict.fromkeys(["/usr", "/lib", "/lib64", sys.base_prefix])):
        os.makedirs(ROOT + folder, exist_ok=True)
        system("mount", folder, ROOT + folder, None, BIND | RECURSIVE, None)
        system("mount", None, ROOT + folder, None, BIND | REMOUNT | READ_ONLY | NO_SETUID | NO_DEVICES, None)
    for top in dict.fromkeys(["", "/usr", "/usr/local", sys.base_prefix]):         # a package may hold a benchmark
        for packages in glob.glob(f"{ROOT}{top}/lib/python3*/*-packages"):
            system("mount", "tmpfs", packages, "tmpfs", READ_ONLY, None)
    os.makedirs(ROOT + "/tmp", exist_ok=True)
    os.chmod(ROOT + "/tmp", 0o777)
    os.chroot(ROOT)   # without privileges there is no way out, nor to a new user namespace, which would give privileges
    os.chdir("/tmp")


def drop_privileges(user: int) -> None:
    """Leave root, if this is root, and every capability, for good."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    system("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    system("capset", struct.pack("Ii", CAPABILITIES_3, 0), bytes(24))
    system("prctl", DUMPABLE, 0, 0, 0, 0)   # the program must not trace init


def shut_in() -> None:
    """Returns in the innermost process of the chain only."""
    system("prctl", DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    enter_new_world()
    user = 1 << 30 | os.getpid()   # nobody else's, so that the limit on processes counts this sandbox alone
    # Blocked, a signal that comes before sigwait is kept for it. A handler could miss one: Python runs handlers between
    # its own instructions, so the last moment before a system call that waits belongs to nobody.
    ends = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    if init := os.fork():
        signal.sigwait(ends)
        os.kill(init, signal.SIGKILL)   # until waitpid the number is its own, also if it has ended by itself
        os.waitpid(init, 0)
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
    os.setsid()
    drop_privileges(user)
    system("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if program := os.fork():
        os.waitpid(program, 0)
        os._exit(0)


def plain(value):
    """The value in JSON, tagged with its type where JSON has none for it; subclasses become what they are based on."""
    if isinstance(value, int) and value.bit_length() > 10_000:       # Python refuses to read such numbers in decimal
        return {"int": hex(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [plain(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
    raise TypeError(f"{type(value).__name__} is no plain value")


def main() -> None:
    """Arguments: CPU seconds, and whether to be shut in ("isolated") or merely limited ("weak")."""
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)

    def reply(**content) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    sys.set_int_max_str_digits(0)
    try:
        if sys.argv[2] == "isolated":
            if sys.platform != "linux":
                raise OSError("namespaces are a feature of Linux")
            shut_in()
        limits = LIMITS | {"CPU": math.ceil(float(sys.argv[1]))}
        if sys.platform == "darwin":
            del limits["AS"]                                           # macOS refuses it
        for name, limit in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    except OSError as error:
        return reply(error=str(error.strerror or error))
    reply(value="ready")
    module = sys.modules["program"] = types.ModuleType("program")     # dataclasses look for the module they are in
    for line in requests:
        request, value = json.loads(line), None
        try:
            if isinstance(request, str):
                value = eval(request, module.__dict__, {"inf": math.inf, "nan": math.nan})   # as `repr` writes them
            else:
                for source in request:
                    exec(source, module.__dict__)
            reply(value=plain(value))
        except BaseException as error:
            reply(error=type(error).__name__)


if __name__ == "__main__":
    main()
