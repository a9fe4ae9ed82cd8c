"""Building of wheels. With $FORESAY_PREBUILD, a wheel contains compiled kernels and is for one kind of machine.

FORESAY_PREBUILD=all, or names of instruction sets in foresay/models/cpu/levels.py. Without it the wheel is for any machine, and
the kernels are compiled when they are first used.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PREBUILD = os.environ.get("FORESAY_PREBUILD", "").split()


class WithKernels(build_py):
    """Adds compiled kernels to the package."""

    def run(self) -> None:
        package = Path(self.build_lib).resolve() / "foresay"
        shutil.rmtree(package / "models" / "cpu" / "prebuilt", ignore_errors=True)  # of an earlier build
        super().run()
        if not PREBUILD or self.editable_mode:
            return
        names = [] if PREBUILD == ["all"] else PREBUILD
        command = [sys.executable, "-m", "foresay.models.cpu", str(package / "models" / "cpu" / "prebuilt"), *names]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(package.parent)})


class Contents(Distribution):
    """Says whether a wheel is for one kind of machine."""

    def has_ext_modules(self) -> bool:
        return bool(PREBUILD)


class Wheel(bdist_wheel):
    """Names no version of Python, whose interface the kernels do not use."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, machine = super().get_tag()
        return ("py3", "none", machine) if PREBUILD else (python, abi, machine)


setup(cmdclass={"build_py": WithKernels, "bdist_wheel": Wheel}, distclass=Contents)
