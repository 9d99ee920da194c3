#!/usr/bin/env bash
# Resolves the lock files again, for every platform and Python from 3.12 on, with hashes and without any index address.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

compile() {
    .venv/bin/uv pip compile --quiet --universal --python-version 3.12 --generate-hashes --no-annotate \
        --custom-compile-command "make lock" "$@"
}
export UV_NO_CONFIG=1
echo 'jax==0.11.2' | compile - pyproject.toml --extra dev -o requirements/lock.txt
# `pip install` takes no hashes in a constraint: pass the bare pins on.
sed -nE 's/^([a-z0-9-]+==[^ ;]+).*/\1/p' requirements/lock.txt >requirements/pins.tmp
trap 'rm -f requirements/pins.tmp' EXIT
echo 'jax[cuda12]==0.11.2' | compile - --constraints requirements/pins.tmp -o requirements/cuda12.txt
compile --no-deps requirements/compile.in -o requirements/compile.txt
compile requirements/jax-0.12.in pyproject.toml --extra test -o requirements/jax-0.12.txt
