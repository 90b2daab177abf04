"""Writes stand-ins for the CUDA libraries that torch's default wheel links to, for a machine that never calls them.

    python standins.py FOLDER_OF_TORCH

``torch_xla`` is published for one torch only, and that torch is published as a CUDA build: importing it needs three
gigabytes of CUDA libraries, none of which is called where there is no GPU. A stand-in has the name and the symbols of
the library and nothing behind them: every function returns 0, but ``cudaGetDeviceCount`` says that there is no device.
The loader finds them beside torch's own libraries, where torch's run path ends. Needs a C compiler and ``readelf``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

CUDA = re.compile(r"lib(cu|nv|nccl)\w*\.so\.\d+")
"""Names of libraries to stand in for."""

UNVERSIONED = re.compile(r"(nccl|nvshmem|cu[A-Z]|cuda[A-Z]|cublas|cudnn|cufft|cupti|curand|cusolver|cusparse)\w*")
"""Their symbols in libraries that put no version on them."""

NO_DEVICE = 100
"""``cudaErrorNoDevice``."""


def inspect(library: Path, *options: str) -> str:
    """What readelf says about one library."""
    done = subprocess.run(["readelf", "-W", *options, str(library)], check=True, capture_output=True, text=True)
    return done.stdout


def missing(folder: Path) -> dict[str, dict[str, set[str]]]:
    """For each CUDA library that torch's libraries need: its versions, and the symbols under each ("" for none)."""
    needed: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    loose: set[str] = set()
    defined: set[str] = set()
    for library in sorted(folder.glob("*.so*")):
        for name in re.findall(r"\(NEEDED\).*\[(.+)\]", inspect(library, "-d")):
            if CUDA.fullmatch(name):
                needed[name][""].update(())
        file_of = versions(library)
        for symbol, version, undefined in symbols(library):
            if not undefined:
                defined.add(symbol)
            elif version and CUDA.fullmatch(file_of.get(version, "")):
                needed[file_of[version]][version].add(symbol)
            elif not version and UNVERSIONED.fullmatch(symbol):
                loose.add(symbol)
    # Which library an unversioned symbol comes from does not matter to the loader: one of them has it.
    if needed:
        needed[min(needed)][""] |= loose - defined
    return needed


def versions(library: Path) -> dict[str, str]:
    """Which file each version of a needed symbol belongs to."""
    file_of: dict[str, str] = {}
    current = ""
    for line in inspect(library, "-V").splitlines():
        if found := re.search(r"Version: 1\s+File: (\S+)", line):
            current = found[1]
        elif (found := re.search(r"Name: (\S+)\s+Flags", line)) and current:
            file_of[found[1]] = current
    return file_of


def symbols(library: Path) -> Iterator[tuple[str, str, bool]]:
    """Name, version and whether it is undefined, of each symbol that the loader looks at."""
    for line in inspect(library, "--dyn-syms").splitlines():
        words = line.split()
        if len(words) > 7 and words[0].rstrip(":").isdigit():
            symbol, _, version = words[7].partition("@")
            yield symbol, version.strip("@"), words[6] == "UND"


def build(name: str, wanted: dict[str, set[str]], folder: Path) -> None:
    """Compile one stand-in."""
    names = sorted(set().union(*wanted.values()))
    lines = [f"int {each}() {{ return {NO_DEVICE if each == 'cudaGetDeviceCount' else 0}; }}" for each in names]
    script = [
        f'{version} {{ global: {" ".join(f"{each};" for each in sorted(wanted[version]))} }};'
        for version in sorted(wanted)
        if version
    ]
    with tempfile.TemporaryDirectory() as place:
        source, mapping = Path(place, "standin.c"), Path(place, "standin.map")
        source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        mapping.write_text("\n".join(script) + "\n", encoding="utf-8")
        options = [f"-Wl,--version-script={mapping}"] if script else []
        command = ["cc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", *options]
        subprocess.run([*command, "-o", str(folder / name), str(source)], check=True)


def main() -> None:
    """Write a stand-in for each library that is needed."""
    folder = Path(sys.argv[1]) / "lib"
    needed = missing(folder)
    for name, wanted in sorted(needed.items()):
        build(name, wanted, folder)
    sys.stdout.write(f"{len(needed)} stand-ins for CUDA libraries in {folder}\n")


if __name__ == "__main__":
    main()
