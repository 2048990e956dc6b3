# The environment of every run and every test, in one place. Source it; a variable that is already set stays as it is.
# shellcheck shell=sh
# shellcheck disable=SC2223

# One thread a process: ranks, engines and reward processes share the cores. With few ranks on many cores, set
# OMP_NUM_THREADS to cores / ranks before sourcing this.
: "${OMP_NUM_THREADS:=1}"
: "${TOKENIZERS_PARALLELISM:=false}"

# A log is read while it is written, also where it is a pipe or a file.
: "${PYTHONUNBUFFERED:=1}"

# Models and data are local folders; nothing asks a hub or sends usage reports.
: "${HF_HUB_OFFLINE:=1}"
: "${VLLM_NO_USAGE_STATS:=1}"
: "${RAY_USAGE_STATS_ENABLED:=0}"

# The engine lives in the worker's own process: that is what lets it share the trainer's weights.
: "${VLLM_ENABLE_V1_MULTIPROCESSING:=0}"
: "${VLLM_LOGGING_LEVEL:=ERROR}"

# Ray's log de-duplication holds lines back for seconds and merges those of different ranks.
: "${RAY_DEDUP_LOGS:=0}"
# Ray sends tensors as bytes that the receiver reads in place.
: "${RAY_ENABLE_ZERO_COPY_TORCH_TENSORS:=1}"
# Ray leaves a rank's visible devices as they are when it reserves no GPU for it.
: "${RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO:=0}"

export OMP_NUM_THREADS TOKENIZERS_PARALLELISM PYTHONUNBUFFERED HF_HUB_OFFLINE VLLM_NO_USAGE_STATS \
  RAY_USAGE_STATS_ENABLED VLLM_ENABLE_V1_MULTIPROCESSING VLLM_LOGGING_LEVEL RAY_DEDUP_LOGS \
  RAY_ENABLE_ZERO_COPY_TORCH_TENSORS RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO

if [ -e /dev/nvidiactl ] || [ -e /dev/nvidia0 ]; then
  # Megatron-Core orders the collectives of tensor parallelism by a single queue on GPUs before Blackwell.
  : "${CUDA_DEVICE_MAX_CONNECTIONS:=1}"
  # FlashInfer's sampler is built at run time; vLLM's own needs no compiler.
  : "${VLLM_USE_FLASHINFER_SAMPLER:=0}"
  # NCCL says what is wrong, and no more. The network is the cluster's to know: docs/cluster.md has what is set there.
  : "${NCCL_DEBUG:=WARN}"
  export CUDA_DEVICE_MAX_CONNECTIONS VLLM_USE_FLASHINFER_SAMPLER NCCL_DEBUG
else
  # On CPU, compiling small functions costs more than they ever save.
  : "${TORCHDYNAMO_DISABLE:=1}"
  : "${TORCH_COMPILE_DISABLE:=1}"
  export TORCHDYNAMO_DISABLE TORCH_COMPILE_DISABLE
fi
