"""Declares the one extension module; everything else about the distribution is in pyproject.toml.

FMQ_SANITIZE=address (or address,undefined) in the environment builds with those sanitizers.
"""

import os

from setuptools import Extension, setup

compile_args = ["-std=c11", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]
# What every module in C does: methods with arguments they ignore, casts to PyCFunction, tables with short last rows.
compile_args += ["-Wno-unused-parameter", "-Wno-cast-function-type", "-Wno-missing-field-initializers"]
link_args: list[str] = []
sanitizers = os.environ.get("FMQ_SANITIZE", "")
if sanitizers:
    compile_args += [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g", "-O1"]
    link_args += [f"-fsanitize={sanitizers}"]

setup(
    ext_modules=[
        Extension(
            "fmq._native",
            ["fmq/_native.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
