#!/usr/bin/env bash
# flash-attn.sh SM: put a wheel of flash-attn 2 into /built: the one that lies in /wheels, else one built for SM alone.
set -euo pipefail
mkdir -p /built
shopt -s nullglob
found=(/wheels/flash_attn-*.whl)
if (( ${#found[@]} )); then
    cp "${found[@]}" /built/
else
    FLASH_ATTN_CUDA_ARCHS=$1 pip wheel --no-deps --no-build-isolation --require-hashes \
        --wheel-dir /built -r /tmp/flash-attn.txt
fi
