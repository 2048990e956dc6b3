"""Runs inside the process of one program that the reward `code` tries out: limits first, then the program.

Started as `python -I sandbox.py` in an empty folder, with an almost empty environment. Reads one JSON line from
descriptor 3: {"program": text, "limits": {...}}; standard input and output are the program's. Standard library only.

What keeps a program in, from strong to weak:
    rlimits         CPU seconds, address space, size of a file, open files, core files
    seccomp         (Linux on x86_64 or aarch64) the kernel refuses sockets, new processes and programs, signals to and
                    tracing of others; a program cannot take this off. Where there is none, an rlimit allows no further
                    process or thread, except to root
    audit hook      Python itself refuses the same, and to open files for writing outside of the folder; native code
                    gets round it, and so does ctypes, which is refused as well where there is no seccomp
    environment     no variables of the trainer's, so no keys or tokens that stand in them
What nothing here keeps it from: reading files that the user may read, and, where there is no seccomp, what native code
may do. Run untrusted models in a container of their own.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

PROGRAM_NAME = "<program>"
# Numbers of system calls: (x86_64, aarch64); None where the machine has no such call.
REFUSED = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "io_uring_setup": (425, 425),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "setpriority": (141, 140), "prlimit64": (302, 261),
    "mount": (165, 40), "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "keyctl": (250, 219),
}  # fmt: skip
CLONE, CLONE3 = (56, 220), (435, 435)
CLONE_THREAD = 0x10000
ARCHES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
EPERM, ENOSYS = 1, 38
_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSED_EVENTS = ("socket.", "subprocess.", "os.exec", "os.posix_spawn", "os.fork", "os.system", "os.kill",
                   "os.putenv", "pty.", "os.chmod", "os.chown", "os.link", "os.symlink")  # fmt: skip
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree", "shutil.move")


def filter_code(arch: int, column: int) -> bytes:
    """The seccomp filter as the kernel takes it: what REFUSED names fails with EPERM, and clone makes threads only."""
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4), (_JUMP_EQ, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0),
    ]  # fmt: skip
    if column == 0:
        # The x32 numbering of the same calls.
        code += [(_JUMP_GE, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            code += [(_JUMP_EQ, 0, 1, number), (_RETURN, 0, 0, _ERRNO | EPERM)]
    # The flags of clone3 are in memory, which a filter cannot read; without it the C library falls back to clone.
    code += [(_JUMP_EQ, 0, 1, CLONE3[column]), (_RETURN, 0, 0, _ERRNO | ENOSYS)]
    code += [(_JUMP_EQ, 0, 3, CLONE[column]), (_LOAD, 0, 0, 16), (_JUMP_SET, 1, 0, CLONE_THREAD)]
    code += [(_RETURN, 0, 0, _ERRNO | EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def lock_system_calls() -> bool:
    """Put the filter in force for this process; False where the system has none."""
    if sys.platform != "linux" or platform.machine() not in ARCHES:
        return False
    code = filter_code(*ARCHES[platform.machine()])
    buffer = ctypes.create_string_buffer(code, len(code))
    found = _Filter(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    return libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0 and (
        libc.prctl(set_seccomp, by_filter, ctypes.byref(found), 0, 0) == 0
    )


def set_limits(limits: dict[str, Any]) -> None:
    """rlimits of this process and what it starts. memory and file: bytes; cpu_s: whole seconds."""
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_FSIZE, limits["file"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_AS, limits["memory"]),
    ):
        _lower(kind, value)


def _lower(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    lowered = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(kind, (lowered, lowered))


def lock_python(folder: str, with_ctypes: bool) -> None:
    """Have Python refuse sockets, processes, and changes of files outside of `folder`. Cannot be undone.

    with_ctypes: leave ctypes to the program, which numpy loads; it gets round all of this.
    """
    refused = _REFUSED_EVENTS if with_ctypes else (*_REFUSED_EVENTS, "ctypes.")
    inside = os.path.realpath(folder) + os.sep
    join, realpath, fspath = os.path.join, os.path.realpath, os.fsdecode
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(refused):
            raise PermissionError(f"{event} is not allowed here")
        changes = event in _CHANGES or (event == "open" and isinstance(args[2], int) and bool(args[2] & writes))
        if (
            changes
            and isinstance(args[0], str | bytes)
            and not (realpath(join(inside, fspath(args[0]))) + os.sep).startswith(inside)
        ):
            raise PermissionError(f"{event}: {fspath(args[0])!r} is outside of the program's folder")

    sys.addaudithook(refuse)


def main() -> None:
    """Set the limits, then run the program as a main module. Its own errors end it as usual, with a traceback."""
    with os.fdopen(3, "r", encoding="utf-8") as channel:
        task = json.loads(channel.read())
    set_limits(task["limits"])
    is_locked = lock_system_calls()
    if task["limits"]["strict"] and not is_locked:
        os._exit(NO_SECCOMP)
    if not is_locked:
        _lower(resource.RLIMIT_NPROC, 0)
    lock_python(os.getcwd(), with_ctypes=is_locked)
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(task["program"], PROGRAM_NAME, "exec"), space)


NO_SECCOMP = 97
"""Exit status where seccomp is asked for and not there."""

if __name__ == "__main__":
    main()
