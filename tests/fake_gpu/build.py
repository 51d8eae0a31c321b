"""Builds the fake GPU for the environment whose interpreter runs this: ``python -m tests.fake_gpu.build``.

PyTorch's CUDA wheel needs the driver, the runtime, and eleven further libraries. Those two are built from ``csrc``; of
the others each function that PyTorch refers to gets a stub that counts its calls and returns 0, success.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
SITE = Path(sysconfig.get_path("purelib"))
FOLDER = Path(sys.prefix) / "fake_gpu"
_RUNTIME, _DRIVER = "libcudart.so.13", "libcuda.so.1"
_OF_CUDA = r"(?:cu|nccl|nv)"
_PREFIXES = {  # libraries whose functions have no version, by what their names begin with
    "libnccl.so.2": "nccl",
    "libcusparseLt.so.0": "cusparseLt",
    "libcufile.so.0": "cuFile",
    "libcupti.so.13": "cupti",
    "libnvrtc.so.13": "nvrtc",
}


@dataclass
class Needs:
    """What PyTorch's libraries need of CUDA's.

    Attributes:
        libraries: names; versions: by library; functions: by version, "" for those that have none.
    """

    libraries: set[str] = field(default_factory=set)
    versions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    functions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def add(self, library: Path) -> None:
        """Read one library's dynamic section and symbols."""
        self.libraries |= set(re.findall(rf"NEEDED.*\[(lib{_OF_CUDA}[^\]]*)\]", _readelf("-d", library)))
        name = ""
        for line in _readelf("-V", library).splitlines():
            if found := re.search(r"File: (\S+)", line):
                name = found[1]
            elif name and (found := re.search(r"Name: (\S+)\s+Flags", line)):
                self.versions[name].add(found[1])
        for line in _readelf("--dyn-syms", library).splitlines():
            words = line.split()
            if len(words) >= 8 and words[6] == "UND" and re.match(rf"(?:{_OF_CUDA}|__cuda)", words[7]):
                function, _, version = words[7].partition("@")
                self.functions[version.strip("@")].add(function)

    def stubs(self, library: str) -> tuple[dict[str, Sequence[str]], Sequence[str]]:
        """Functions of a library by version, and those without one."""
        prefix = _PREFIXES.get(library)
        loose = [name for name in self.functions[""] if prefix is not None and name.startswith(prefix)]
        return {each: sorted(self.functions[each]) for each in sorted(self.versions[library])}, sorted(loose)


def _readelf(option: str, library: Path) -> str:
    return subprocess.run(["readelf", option, "-W", str(library)], capture_output=True, text=True, check=True).stdout


def _compile(sources: Iterable[Path], library: str, *options: str) -> None:
    """Make one of the libraries."""
    path = FOLDER / "lib" / library
    command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", "-Wno-attributes", *map(str, sources), "-o", str(path)]
    command += [f"-Wl,-soname,{library}", "-Wl,-rpath,$ORIGIN", f"-L{FOLDER / 'lib'}", *options]
    subprocess.run(command, check=True)


def _stub(library: str, needs: Needs) -> None:
    versions, loose = needs.stubs(library)
    names = [name for each in versions.values() for name in each] + list(loose)
    code = ['extern "C" int fake_gpu_stub(const char*);']
    code += [f'extern "C" int {name}() {{ return fake_gpu_stub("{name}"); }}' for name in names]
    source, script = FOLDER / "stub.cpp", FOLDER / "stub.map"
    source.write_text("\n".join(code) + "\n")
    script.write_text("".join(f"{each} {{ global: {'; '.join(versions[each])}; }};\n" for each in versions))
    _compile([source], library, "-lfakegpu", *([f"-Wl,--version-script={script}"] if versions else []))


def main() -> None:
    """Build everything."""
    libraries = FOLDER / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    headers = [f"-I{SITE / 'nvidia/cu13/include'}", "-idirafter", str(SITE / "triton/backends/nvidia/include")]
    _compile(
        [SOURCES / f"{name}.cpp" for name in ("counters", "devices", "streams", "memory")],
        "libfakegpu.so",
        "-lpthread",
        "-ldl",
    )
    exported = FOLDER / "runtime.map"
    exported.write_text(f"{_RUNTIME} {{ global: cuda*; __cuda*; local: *; }};\n")
    _compile([SOURCES / "runtime.cpp"], _RUNTIME, *headers, f"-Wl,--version-script={exported}", "-lfakegpu", "-ldl")
    _compile([SOURCES / "driver.cpp"], _DRIVER, "-lfakegpu", "-ldl")
    (libraries / "libcuda.so").unlink(missing_ok=True)
    (libraries / "libcuda.so").symlink_to(_DRIVER)
    needs = Needs()
    torch = SITE / "torch"
    for library in sorted((torch / "lib").glob("*.so")):
        needs.add(library)
    for name in sorted(needs.libraries - {_RUNTIME, _DRIVER}):
        _stub(name, needs)
    includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}", *headers]
    includes += [f"-L{torch / 'lib'}", f"-L{libraries}"]
    libraries_of_torch = ("-ltorch", "-ltorch_cpu", "-lc10", "-lc10_cuda", "-Wl,--allow-shlib-undefined")
    _compile([SOURCES / "operators.cpp"], "libfakegpuoperators.so", *includes, *libraries_of_torch)
    real = SITE / "nvidia/cu13/lib"
    if real.is_dir():
        real.rename(real.with_name("lib_of_the_wheel"))  # PyTorch's libraries look there first
    print(f"the fake GPU is in {FOLDER}")


if __name__ == "__main__":
    main()
