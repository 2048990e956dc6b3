# The GPU stack, pinned: Python 3.12, CUDA 13, torch 2.11, vLLM 0.26, Megatron-Core 0.19.2, Ray 2.60.
# NOT BUILT YET: it was written on a machine without a container engine. The versions of torch, vLLM, Megatron-Core and
# Ray ran together on an H200 without this image. pip resolves every install line for Python 3.12 (--dry-run); the names
# of Ubuntu's packages and the base image could not be looked up, so the image is named by its tag and not by a digest.
#
#   docker build -t megatron_rl .
#   docker run --gpus all --shm-size=16g -it megatron_rl megatron-rl check configs/grpo-qwen2.5-7b-1n8g.yaml
#   enroot import -o megatron_rl.sqsh dockerd://megatron_rl:latest        for launch/slurm.sbatch
#
# Layers by rate of change, slowest first: system, torch, what compiles, engine and trainer, this package.

FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# RDMA libraries are what NCCL loads for InfiniBand and RoCE; ssh is for launch/ray_cluster.sh.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
       git ibverbs-providers libibverbs1 librdmacm1 ninja-build openssh-client python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv

RUN pip install setuptools==80.10.2 wheel==0.48.0 packaging==26.4 pybind11==3.1.0 \
    && pip install torch==2.11.0 torchvision==0.26.0 torchaudio==2.11.0 \
       --index-url https://download.pytorch.org/whl/cu130

# What compiles for half an hour, and what no run uses yet: Transformer Engine and apex's fused kernels.
ARG WITH_TE=0
ARG TE_VERSION=2.16.1
ARG WITH_APEX=0
ARG APEX_REF=25.09
# Compute capabilities to compile for: 8.0 A100, 9.0 H100 and H200, 10.0 B200.
ARG CUDA_ARCHS="80;90;100"
RUN if [ "$WITH_TE" = 1 ]; then \
      NVTE_FRAMEWORK=pytorch NVTE_CUDA_ARCHS="$CUDA_ARCHS" MAX_JOBS=8 \
      pip install --no-build-isolation "transformer-engine[core-cu13,pytorch]==$TE_VERSION"; \
    fi
RUN if [ "$WITH_APEX" = 1 ]; then \
      git clone --depth 1 --branch "$APEX_REF" https://github.com/NVIDIA/apex /tmp/apex \
      && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation /tmp/apex \
      && rm -rf /tmp/apex; \
    fi

WORKDIR /workspace/megatron_rl
# The package's metadata alone: a change of its code leaves the layer of its dependencies as it is. The server of jobs
# (ray job submit, KubeRay) is part of ray[default].
COPY setup.py pyproject.toml LICENSE ./
COPY requirements ./requirements
RUN mkdir megatron_rl && touch megatron_rl/__init__.py \
    && pip install --no-build-isolation -c requirements/gpu-constraints.txt -e ".[gpu,dev]" "ray[default]==2.60.0"

COPY . .
RUN pip install --no-deps --no-build-isolation -e .

# What launch/env.sh sets on a GPU. Processes started with `docker run IMAGE command` get it as well.
ENTRYPOINT ["bash", "-c", ". /workspace/megatron_rl/launch/env.sh && exec \"$@\"", "megatron_rl"]
CMD ["megatron-rl", "--help"]
