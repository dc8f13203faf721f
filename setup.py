"""Declares the extension module and a library, the data of the demo and the description; everything else is in pyproject.toml.

FMQ_SANITIZE=address (or address,undefined) in the environment builds with those sanitizers. The build backend sets two more:
AIONN_BUILD_BASE, the folder of intermediate files, and AIONN_CC, the compiler of a wheel for another platform.
"""

import os
import re
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
DATA = "examples/data"
PACKAGED_DATA = "aionn/example_data"
"""Where a wheel has the files of ``DATA``; ``aionn/cli/example_data.py`` looks in both places."""

compile_args = ["-std=c11", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]
# What every module in C does: methods with arguments they ignore, casts to PyCFunction, tables with short last rows.
compile_args += ["-Wno-unused-parameter", "-Wno-cast-function-type", "-Wno-missing-field-initializers"]
link_args: list[str] = []
sanitizers = os.environ.get("FMQ_SANITIZE", "")
if sanitizers:
    compile_args += [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g", "-O1"]
    link_args += [f"-fsanitize={sanitizers}"]


class BuildExtension(build_ext):
    """Compiles with AIONN_CC, if that is set, and without the flags of the Python that runs, which may be for another processor."""

    def build_extensions(self) -> None:
        compiler = os.environ.get("AIONN_CC")
        if compiler:
            self.compiler.set_executables(compiler_so=f"{compiler} -fPIC", linker_so=f"{compiler} -shared")
        super().build_extensions()


class BuildPackages(build_py):
    """Copies the data of the demo into the package: in the source tree they are with the examples."""

    def run(self) -> None:
        super().run()
        for source, target in self._data():
            self.mkpath(os.path.dirname(target))
            self.copy_file(source, target, preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(target for _, target in self._data())]

    def _data(self) -> list[tuple[str, str]]:
        if self.editable_mode:
            return []
        files = sorted(path for path in (HERE / DATA).iterdir() if path.is_file())
        return [(str(path), os.path.join(self.build_lib, PACKAGED_DATA, path.name)) for path in files]


def description() -> str:
    """README.md as a package index shows it: a link to a file of the source tree leads nowhere there and becomes its text."""
    parts = re.split(
        r"(^```.*?^```$)", (HERE / "README.md").read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    # Every other part is a block of code, which stays as it is.
    parts[::2] = [re.sub(r"\[([^\]]+)\]\((?![a-z]+:)[^)]*\)", r"\1", part) for part in parts[::2]]
    return "".join(parts)


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension(
            "fmq._native",
            ["fmq/_native.c", "fmq/_slots.c", "fmq/_answers.c"],
            depends=["fmq/_native.h"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        ),
        # A library that no one imports: it has the name of a module, by which it is built and packed as one.
        Extension(
            "aionn.drivers.onnxruntime._entry",
            ["aionn/drivers/onnxruntime/_entry.c"],
            py_limited_api=True,
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        ),
    ],
    cmdclass={"build_ext": BuildExtension, "build_py": BuildPackages},
    options={
        "bdist_wheel": {"py_limited_api": "cp311"},
        "build": {"build_base": os.environ.get("AIONN_BUILD_BASE", "build")},
    },
)
