#!/usr/bin/env bash
# Runs what a GPU machine would run, with small sizes and without a GPU; its exit code is that of benchmarks/gpu.py.
#
#   scripts/gpu_rehearsal.sh ENVIRONMENT [OPTION OF benchmarks/gpu.py]...
#
# The environment stands for the GPU machine's Python (`make -f benchmarks/Makefile gpu-rehearsal` makes one). The copy of the tree has no autoaccum/,
# so that only the wheel can be imported. OUT names the folder for the results, by default build/gpu-rehearsal.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin="$(realpath "$1")/bin"
shift
OUT="$(realpath -m "${OUT:-build/gpu-rehearsal}")"
mkdir -p "$OUT"  # gpu.py removes its files of an earlier run
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/tree" "$scratch/tmp"

# Without what is deleted but still in the index.
git ls-files -coz --exclude-standard | while read -rd '' path; do
    if [ -e "$path" ]; then printf '%s\0' "$path"; fi
done | tar -c --null --files-from - | tar -x -C "$scratch/tree"
cd "$scratch/tree"
command="$(scripts/gpu_bundle.sh --device cpu --tiny "$@")"
rm -r autoaccum
env -u PYTHONPATH PATH="$bin:$PATH" TMPDIR="$scratch/tmp" OUT="$OUT" bash -c "$command"
