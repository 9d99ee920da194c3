#!/usr/bin/env bash
# Builds the wheel, installs it with the dependencies it declares into a fresh environment, and uses it from another folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root="$PWD"

rm -rf build dist
log="$(.venv/bin/python -m build --wheel --no-isolation 2>&1)" || { echo "$log" >&2; exit 1; }
wheel="$(echo "$root"/dist/dsa_jax-*.whl)"
folder="$(mktemp -d)"
trap 'rm -rf "$folder" "$root/build"' EXIT
# The locked versions, so that a release of the day cannot break this check.
sed -nE 's/^([a-z0-9-]+==[^ ;]+).*/\1/p' requirements/lock.txt >"$folder/pins.txt"
.venv/bin/uv venv --quiet --seed --python .venv/bin/python "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check -c "$folder/pins.txt" "$wheel[train,viz]"
cp "$root/tests/check_installed.py" "$folder/"
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python -I check_installed.py "$root"
venv/bin/dsa-jax --version
JAX_PLATFORMS=cpu venv/bin/dsa-jax layout >/dev/null
echo "wheel-check: $(basename "$wheel") ($(du -k "$wheel" | cut -f1) KiB) works outside the checkout"
