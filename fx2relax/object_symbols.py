"""The symbols that an object file defines."""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

#: What TVM's FFI puts before the name of a function that it exports.
PREFIX = "__tvm_ffi_"
# ELF's numbers.
_RELOCATABLE, _EXECUTABLE, _SHARED = 1, 2, 3
_SYMTAB = 2
_LOCAL, _GLOBAL = 0, 1
_UNDEFINED = 0
_MACH_O = b"\xcf\xfa\xed\xfe"


@dataclass(frozen=True)
class Symbols:
    """What other objects see of an object.

    Attributes:
        strong: the symbols of which a library may have one each.
        weak: those of which the linker takes any, as of templates and inline functions.
    """

    strong: frozenset[str]
    weak: frozenset[str]

    @property
    def functions(self) -> frozenset[str]:
        """The functions that TVM can call, by the names they are exported under."""
        names = (s.removeprefix(PREFIX) for s in self.strong | self.weak if s.startswith(PREFIX))
        # Two underscores more are documentation and metadata.
        return frozenset(n for n in names if not n.startswith(("_metadata_", "_doc_")))


def read_symbols(data: bytes, name: str = "object") -> Symbols:
    """Read the symbol table of an object file.

    Args:
        data: its bytes: ELF of 64 bits, or whatever ``nm`` reads.
        name: what it is called in errors.

    Raises:
        ValueError: it is no object file, or one that is linked already.
    """
    if data[:4] != b"\x7fELF":
        return _by_nm(data, name)
    try:
        return _elf(data, name)
    except (struct.error, IndexError) as error:
        raise ValueError(f"{name} is no whole object file: {error}") from None


def _elf(data: bytes, name: str) -> Symbols:
    if data[4] != 2:
        raise ValueError(f"{name} is an object file of 32 bits")
    order = "<" if data[5] == 1 else ">"
    (kind,) = struct.unpack_from(order + "H", data, 16)
    if kind not in (_RELOCATABLE, _EXECUTABLE, _SHARED):
        raise ValueError(f"{name} is no object file")
    if kind != _RELOCATABLE:
        raise ValueError(f"{name} is linked already; an object file is what `c++ -c` makes")
    (start,) = struct.unpack_from(order + "Q", data, 40)
    size, count = struct.unpack_from(order + "HH", data, 58)
    sections = [
        struct.unpack_from(order + "IIQQQQIIQQ", data, start + i * size) for i in range(count)
    ]
    strong: set[str] = set()
    weak: set[str] = set()
    for section in sections:
        if section[1] != _SYMTAB:
            continue
        _, _, _, _, offset, length, link, _, _, entry = section
        names = sections[link][4]
        for place in range(offset, offset + length, entry):
            at, info, _, where = struct.unpack_from(order + "IBBH", data, place)
            if where == _UNDEFINED or info >> 4 == _LOCAL:
                continue
            text = data[names + at : data.index(b"\0", names + at)].decode()
            (strong if info >> 4 == _GLOBAL else weak).add(text)
    return Symbols(frozenset(strong), frozenset(weak))


def _by_nm(data: bytes, name: str) -> Symbols:
    program = shutil.which("nm")
    if program is None:
        raise ValueError(f"{name} is no ELF object file, and there is no `nm` to read others")
    with tempfile.TemporaryDirectory(prefix="fx2relax-") as folder:
        path = Path(folder) / "kernel.o"
        path.write_bytes(data)
        command = [program, "-g", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.split() for line in done.stdout.splitlines()]
    defined = [(line[-2], line[-1]) for line in lines if len(line) >= 2 and line[-2] not in "Uvw"]
    if done.returncode or not defined:
        raise ValueError(f"{name} is no object file: {done.stderr.strip() or 'it defines nothing'}")
    if data[:4] == _MACH_O:  # whose symbols have one underscore more
        defined = [(kind, text.removeprefix("_")) for kind, text in defined]
    weak = frozenset(text for kind, text in defined if kind in "VWu")
    return Symbols(frozenset(text for _, text in defined) - weak, weak)
