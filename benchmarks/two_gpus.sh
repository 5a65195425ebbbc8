#!/bin/sh
# The run on two GPUs over NVLink, one rank a GPU: tests, comparison, stress, negative controls, a killed rank.
#   sh benchmarks/two_gpus.sh OUT [options of gpu_session.py]
# The steps and their limits are the plan two-gpus of gpu_session.py; NVLink multicast stays switched off.
set -eu
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
out=${1:?folder of the results}
shift
exec python3 "$(dirname "$0")/gpu_session.py" "$out" --plan two-gpus "$@"
