#!/usr/bin/env bash
# Makes one of the project's environments and says what it chose; does nothing when that environment is up to date.
#   scripts/setup.sh main      .venv: the locked packages and the project, editable
#   scripts/setup.sh compile   .cuda-wheels: what compiles GPU kernels without a GPU (Linux only)
#   scripts/setup.sh jax-0.12  .venv-jax-0.12: the next JAX with the same compile wheels (Linux only)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

# A candidate counts only if it runs: a pyenv shim may exist and fail, and a build may lack ssl.
works() {
    "$1" -c 'import ctypes, ssl, sys, zlib
sys.exit(not ((3, 12) <= sys.version_info[:2] <= (3, 14) and sys.maxsize > 2**32))' >/dev/null 2>&1 </dev/null
}
makes_venvs() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1 </dev/null; }
version_of() { "$1" -c 'import platform; print(platform.python_version())'; }

candidates() {
    local name
    for name in python3.12 python3.13 python3.14 python3 python; do type -aP "$name" || true; done
    for name in 3.12 3.13 3.14; do
        compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/$name*/bin/python3" || true
    done
}

# Sets `uv` to a working uv: the one on the path, or one fetched with whatever Python is there.
find_uv() {
    local python
    for uv in "$(type -P uv || true)" .uv/bin/uv; do
        if [ -n "$uv" ] && "$uv" --version >/dev/null 2>&1; then return; fi
    done
    say "fetching uv into .uv"
    while read -r python; do
        rm -rf .uv
        if "$python" -m venv .uv >/dev/null 2>&1; then
            .uv/bin/python -m pip install -qq uv 2>/dev/null || true
        else
            rm -rf .uv
            "$python" -m pip install -qq --target .uv uv >/dev/null 2>&1 || true
        fi
        uv=.uv/bin/uv
        if "$uv" --version >/dev/null 2>&1; then return; fi
    done < <(type -aP python3 python || true; compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/3*/bin/python3" || true)
    rm -rf .uv
    fail "no Python from 3.12 to 3.14 works here and uv could not be fetched; install Python 3.12 and run this again"
}

# make_venv FOLDER: an environment with pip, from the first Python that can make one, else through uv.
make_venv() {
    local python bare="" uv
    rm -rf "$1"
    while read -r python; do
        works "$python" || continue
        if makes_venvs "$python" && "$python" -m venv "$1" >/dev/null 2>&1; then
            say "Python $(version_of "$python") at $python makes $1"
            return
        fi
        rm -rf "$1"
        bare="${bare:-$python}"
    done < <(candidates)
    find_uv
    if [ -n "$bare" ]; then
        say "Python $(version_of "$bare") at $bare cannot make environments itself; $uv makes $1 from it"
    else
        say "no Python from 3.12 to 3.14 works here; $uv fetches 3.12 and makes $1"
    fi
    "$uv" venv --quiet --seed --python "${bare:-3.12}" "$1" ||
        fail "uv could not make $1; install Python 3.12 with its venv module and run this again"
}

# install FOLDER LOCK...: the locked packages by hash, then the project itself.
install() {
    local venv="$1" lock
    shift
    for lock in "$@"; do
        say "installing the packages of $lock into $venv (a minute or two)"
        "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --require-hashes -r "$lock"
    done
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
}

linux_only() {
    case "$(uname -s)-$(uname -m)" in Linux-x86_64 | Linux-aarch64) ;; *)
        say "GPU kernels cannot be compiled on $(uname -sm): $1 left out, its tests are skipped"
        exit 0 ;;
    esac
}

what="${1:-main}"
case "$what" in
main)
    folder=.venv inputs=(requirements/lock.txt)
    # On a machine with an NVIDIA card the same command runs there.
    if [ "$(uname -s)" = Linux ] && nvidia-smi -L >/dev/null 2>&1; then inputs+=(requirements/cuda12.txt); fi ;;
compile)
    folder=.cuda-wheels inputs=(requirements/compile.txt)
    linux_only "$folder" ;;
jax-0.12)
    folder=.venv-jax-0.12 inputs=(requirements/jax-0.12.txt)
    linux_only "$folder" ;;
*) fail "unknown environment '$what'; wanted main, compile or jax-0.12" ;;
esac

# The stamp holds whatever the environment depends on: the locks, the project's metadata, this script, the place.
stamp="$(printf '%s ' "$PWD" "${inputs[@]}"; cat "${inputs[@]}" pyproject.toml setup.py scripts/setup.sh | cksum)"
runner="$folder/bin/python"
[ "$what" = compile ] && runner=.venv/bin/python
if [ "$(cat "$folder/.stamp" 2>/dev/null)" = "$stamp" ] && works "$runner"; then
    say "$folder is up to date (Python $(version_of "$runner"))"
    exit 0
fi

if [ "$what" = compile ]; then
    say "installing the packages of requirements/compile.txt into $folder (240 MB to fetch)"
    rm -rf "$folder" "$folder.new"
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes \
        --target "$folder.new" -r requirements/compile.txt
    mv "$folder.new" "$folder"
else
    if works "$runner" && "$runner" -m pip --version >/dev/null 2>&1; then
        say "Python $(version_of "$runner") of the $folder that is already there"
    else
        make_venv "$folder"
    fi
    install "$folder" "${inputs[@]}"
fi
printf '%s\n' "$stamp" >"$folder/.stamp"
say "$folder is ready"
