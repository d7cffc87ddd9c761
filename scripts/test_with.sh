#!/usr/bin/env bash
# Runs the tests in an environment other than the one for development, beside it:
#
#   scripts/test_with.sh newest             quick tests, with the newest release of every package
#   scripts/test_with.sh nightly            quick tests, with tonight's PyTorch, from the index PYTORCH_NIGHTLY_INDEX
#   scripts/test_with.sh oldest-torch       quick tests, with the oldest PyTorch that pyproject.toml allows
#   scripts/test_with.sh oldest-adapters    quick tests of the adapters, with the oldest frameworks
#   scripts/test_with.sh python 3.13        every test but the sweeps, on this Python
#   scripts/test_with.sh ray                the slow tests of Ray Train (some 4 minutes); Ray has 200 MB
#   scripts/test_with.sh ultralytics        the slow test of ultralytics' command; it has 400 MB
#   scripts/test_with.sh releases           `autoaccum verify` of older trainers (some 20 minutes, an environment each)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind="${1:?say newest, nightly, oldest-torch, oldest-adapters, python, ray, ultralytics or releases}"
environment=".venv-$kind${2:+-$2}"
workers=(-n logical --maxprocesses 4 --dist loadfile)
quick=("${workers[@]}" -m 'not slow and not sweep')

prepare() {
    [ -x "$environment/bin/python" ] || uv venv --quiet --python "${python:-python3}" "$environment"
    uv pip install --quiet --python "$environment/bin/python" --editable . --group dev "$@"
}
# A version manager has pythons that are on no PATH; uv downloads what is nowhere.
found() {
    local own=("$(pyenv root 2>/dev/null || echo ~/.pyenv)/versions/$1."*/bin/python)
    [ -x "${own[-1]}" ] && echo "${own[-1]}" || echo "$1"
}
run() { "$environment/bin/python" -m pytest "$@"; }

case "$kind" in
newest) prepare --upgrade && run "${quick[@]}" ;;
nightly)
    : "${PYTORCH_NIGHTLY_INDEX:?say from which index nightly builds of PyTorch come}"
    prepare
    uv pip install --quiet --python "$environment/bin/python" --upgrade --pre torch torchvision \
        --index-url "$PYTORCH_NIGHTLY_INDEX"
    run "${quick[@]}"
    ;;
# With the torchvision that was made for it.
oldest-torch)
    prepare 'torch==2.8.0' 'torchvision==0.23.0'
    uv pip uninstall --quiet --python "$environment/bin/python" torchao  # newer versions need a newer torch
    run "${quick[@]}"
    ;;
# lightning 2.4 wants an older packaging than twine, which builds releases.
oldest-adapters)
    prepare --override /dev/stdin 'transformers==4.57.6' 'accelerate==1.10.1' 'lightning==2.4.0' 'trl==0.24.0' 'peft==0.17.1' <<< 'packaging>=26'
    uv pip uninstall --quiet --python "$environment/bin/python" torchao  # peft 0.17 cannot import newer versions
    run "${quick[@]}" tests/integrations
    ;;
python) python="$(found "$2")" prepare --constraint constraints.txt && run "${workers[@]}" -m 'not sweep' ;;
ray) prepare --group ray --constraint constraints.txt && run tests/across/test_ranks_ray.py ;;
ultralytics) prepare --group ultralytics --constraint constraints.txt && run tests/launch/test_run_ultralytics.py ;;
releases) .venv/bin/python -m pytest -m sweep tests/verify/test_runs_releases.py ;;
*) echo "no such environment: $kind" >&2 && exit 2 ;;
esac
